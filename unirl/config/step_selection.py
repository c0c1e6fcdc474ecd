"""Whether a selection of stochastic steps can be made, for the check and for the run alike."""

from __future__ import annotations

from collections.abc import Iterator

from unirl.config.problem import Problem
from unirl.config.schema import SdeStepsConfig

_BLOCK = "sampling.sde_steps"


def selection_problems(sde: SdeStepsConfig, num_inference_steps: int) -> Iterator[Problem]:
    """What keeps `sde` from selecting steps of a schedule of that many; at most one problem."""
    if sde.strategy == "list":
        yield from _listed_steps(sde, num_inference_steps)
    else:
        yield from _steps_of_range(sde, num_inference_steps)


def earliest_last_step(sde: SdeStepsConfig, num_inference_steps: int, num_starts: int) -> int:
    """The last stochastic step of the rollout whose selection ends first.

    num_starts: start noises of a group. Only of a selection without problems.
    """
    candidates = sde.candidates(num_inference_steps)
    match sde.strategy:
        case "list":
            return max(sde.steps or ())
        case "all":
            return candidates[-1]
        case "stratified":
            return candidates[min(num_starts, len(candidates)) - 1]
        case _:
            return candidates[(sde.num_steps or len(candidates)) - 1]


def _listed_steps(sde: SdeStepsConfig, num_inference_steps: int) -> Iterator[Problem]:
    key, steps, last = f"{_BLOCK}.steps", sde.steps, num_inference_steps - 1
    if not steps:
        found = "null" if steps is None else "empty"
        yield Problem(
            key, f"is {found}, but strategy=list takes the steps named there, e.g. {key}=[0,1]."
        )
    elif len(set(steps)) < len(steps):
        yield Problem(key, f"is {steps}, which names a step twice.")
    elif max(steps) >= last:
        yield Problem(
            key,
            f"is {steps}, but sampling.num_inference_steps={num_inference_steps} has steps 0 to "
            f"{last}, and the last one is never stochastic: its Gaussian is too sharp. "
            f"Name steps below {last}.",
        )


def _steps_of_range(sde: SdeStepsConfig, total: int) -> Iterator[Problem]:
    start, end = sde.range
    if not 0 <= start < end <= 1:
        yield Problem(f"{_BLOCK}.range", f"is {list(sde.range)}; it needs 0 <= start < end <= 1.")
        return
    candidates = sde.candidates(total)
    found = (
        f"of {total} steps, range [{start:g}, {end:g}] selects [int({total} x {start:g}), "
        f"int({total} x {end:g})) without the last step = [{candidates.start}, {candidates.stop})"
    )
    if not candidates:
        yield Problem(
            f"{_BLOCK}.range", f"{found}: none. Widen it, or raise sampling.num_inference_steps."
        )
    elif sde.strategy in ("random", "window", "progressive"):
        yield from _some_of_range(sde, len(candidates), found)


def _some_of_range(sde: SdeStepsConfig, num_candidates: int, found: str) -> Iterator[Problem]:
    if sde.num_steps is None:
        yield Problem(
            f"{_BLOCK}.num_steps",
            f"is null, but strategy={sde.strategy} takes so many of the {num_candidates} steps in "
            f"its range. Set {_BLOCK}.num_steps, or {_BLOCK}.strategy=all.",
        )
    elif sde.num_steps > num_candidates:
        yield Problem(
            f"{_BLOCK}.num_steps",
            f"is {sde.num_steps}, but {found}: {num_candidates}. Lower it or widen the range.",
        )
    elif sde.window_pace != "constant" and sde.min_rollouts_per_window > sde.rollouts_per_window:
        yield Problem(
            f"{_BLOCK}.min_rollouts_per_window",
            f"is {sde.min_rollouts_per_window}, but with window_pace={sde.window_pace} rollouts "
            f"per window fall to it from rollouts_per_window={sde.rollouts_per_window}. Lower it.",
        )
