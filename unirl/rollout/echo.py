"""Whether an engine did what it was asked: noise levels, stochastic steps, number of samples.

An engine that shifts its schedule once more, or draws its own window, still returns pretty images;
training on them would follow a policy that was never sampled from.
"""

from __future__ import annotations

import math

from unirl.core.errors import RolloutError
from unirl.core.types import Rollout, RolloutRequest

SIGMA_ATOL, SIGMA_RTOL = 1e-5, 1e-4


def require_as_asked(request: RolloutRequest, rollout: Rollout) -> None:
    """Raise RolloutError with what was asked and what was found."""
    _same_levels(request.sigmas, rollout.sigmas)
    made = [tuple(row) for row in rollout.trajectory.steps.tolist()]
    if len(made) != len(request):
        raise RolloutError(f"the engine was asked for {len(request)} samples, but made {len(made)}")
    for sample, (asked, found) in enumerate(zip(request.sde_steps, made, strict=True)):
        if asked != found:
            raise RolloutError(
                f"the engine was asked for stochastic steps {asked} in sample {sample}, but made "
                f"{found}"
            )


def _same_levels(asked: tuple[float, ...], used: tuple[float, ...]) -> None:
    if len(asked) != len(used):
        raise RolloutError(
            f"the engine was asked for {len(asked) - 1} steps, but made {len(used) - 1}"
        )
    for number, (a, u) in enumerate(zip(asked, used, strict=True)):
        if not math.isclose(a, u, rel_tol=SIGMA_RTOL, abs_tol=SIGMA_ATOL):
            raise RolloutError(
                f"the engine stepped through other noise levels than asked: level {number} is "
                f"{u:.6g} instead of {a:.6g}. Does it apply a shift of its own?"
            )
