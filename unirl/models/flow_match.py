"""Noise levels of diffusers' flow-matching schedulers, as their pipelines set them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from unirl.core.errors import ModelError

LARGEST_MISS = 2e-6
"""A first level this near to 1 is 1 but for the rounding of float32 (shift 3 is exact, 1.4976 is
not), or for the 1e-6 that UniPC's solver takes off; an SDE step divides by 1 - sigma, so it is made
exact."""


def scheduler_sigmas(
    scheduler: Any, num_steps: int, *, mu: float | None = None, grid: Sequence[float] | None = None
) -> tuple[float, ...]:
    """T + 1 levels from 1 to 0 that `set_timesteps` leaves in the scheduler.

    mu: the shift where it depends on the resolution; grid: the T levels before any shift, where the
    pipeline gives its own. Raises ModelError for a schedule that does not run from 1 to 0.
    """
    arguments: dict[str, Any] = {} if mu is None else {"mu": mu}
    if grid is None:
        scheduler.set_timesteps(num_steps, **arguments)
    else:
        scheduler.set_timesteps(sigmas=list(grid), **arguments)
    return from_one_to_zero(scheduler.sigmas.tolist())


def from_one_to_zero(levels: Sequence[float]) -> tuple[float, ...]:
    """The levels with a first one of exactly 1. Raises ModelError where they do not run from 1 to
    0."""
    first, *rest = levels
    # Not `>`: a scheduler with shift_terminal gives NaN for one step.
    if not abs(first - 1) <= LARGEST_MISS or not rest or rest[-1] != 0:
        raise ModelError(
            f"the scheduler's noise levels run from {first:g} to {rest[-1] if rest else first:g} "
            f"with sampling.num_inference_steps={len(rest)}, where 1 to 0 is needed. Set "
            "sampling.sigma_schedule=linear, or another number of steps."
        )
    return (1.0, *rest)


def whole_timesteps(sigma: Tensor, num_timesteps: int) -> Tensor:
    """[B] float32 what schedulers that cut to whole timesteps (UniPC, DPM-Solver) tell a network at
    levels sigma [B].

    A level that is a whole number of thousandths must not fall below it for being rounded to
    float32; without a flow_shift there are some that fall below it in UniPC's own float64.
    """
    whole = (sigma.double() * num_timesteps + 1e-4).floor().float()
    return whole.clamp(max=num_timesteps - 1)


def linear_grid(num_steps: int) -> list[float]:
    """1, ..., 1/T: the levels that most pipelines hand to their scheduler, as numpy spaces them."""
    import numpy as np

    return np.linspace(1.0, 1 / num_steps, num_steps).tolist()


def resolution_shift(config: Mapping[str, Any], num_tokens: int) -> float:
    """mu of a scheduler's config, linear in the number of image tokens."""
    base, largest = config["base_image_seq_len"], config["max_image_seq_len"]
    slope = (config["max_shift"] - config["base_shift"]) / (largest - base)
    return num_tokens * slope + config["base_shift"] - slope * base
