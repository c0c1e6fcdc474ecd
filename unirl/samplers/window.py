"""Which steps are stochastic: a pure function of the rollout id, so a resume repeats it."""

from __future__ import annotations

import random
from itertools import accumulate

from unirl.config.schema import SdeStepsConfig
from unirl.config.step_selection import selection_problems
from unirl.core.errors import ConfigError

Steps = tuple[int, ...]


def select_sde_steps(
    config: SdeStepsConfig,
    num_inference_steps: int,
    rollout_id: int,
    seed: int,
    group_size: int,
    samples_per_start: int,
) -> tuple[Steps, ...]:
    """For each of the G samples of a group its S steps, ascending, never empty.

    The same for all groups; sample g belongs to start g // samples_per_start. Only `stratified`
    gives different starts different steps.

    Raises ConfigError for a selection that cannot be made, and groups that are no whole starts.
    """
    problem = next(selection_problems(config, num_inference_steps), None)
    if problem is not None:
        raise ConfigError(f"{problem.key} {problem.message}")
    num_starts = group_size // samples_per_start
    if num_starts * samples_per_start != group_size or num_starts == 0:
        raise ConfigError(
            f"A group of {group_size} samples has no whole number of starts of "
            f"sampling.samples_per_start={samples_per_start} each. Set it to a divisor of "
            f"{group_size}."
        )
    draw = random.Random(f"{seed}/sde-steps/{rollout_id}")
    candidates = config.candidates(num_inference_steps)
    if config.strategy == "stratified":
        steps = _spread(candidates, num_starts, draw)
        return tuple((steps[sample // samples_per_start],) for sample in range(group_size))
    return (_steps_of_rollout(config, candidates, rollout_id, draw),) * group_size


def _steps_of_rollout(
    config: SdeStepsConfig, candidates: range, rollout_id: int, draw: random.Random
) -> Steps:
    size = config.num_steps or len(candidates)
    last_start = len(candidates) - size
    match config.strategy:
        case "list":
            return tuple(sorted(config.steps or ()))
        case "all":
            return tuple(candidates)
        case "random":
            return tuple(sorted(draw.sample(candidates, size)))
        case "window":
            start = draw.randint(0, last_start)
        case _:
            start = _progressive_start(config, last_start, rollout_id)
    return tuple(candidates[start : start + size])


def _spread(candidates: range, num_starts: int, draw: random.Random) -> list[int]:
    """A step for each start: each candidate floor or ceil of starts / candidates times."""
    rounds, rest = divmod(num_starts, len(candidates))
    steps = [*candidates] * rounds + draw.sample(candidates, rest)
    draw.shuffle(steps)
    return steps


def _progressive_start(config: SdeStepsConfig, last_start: int, rollout_id: int) -> int:
    """The window's position (MixGRPO, arXiv:2507.21802): 0, stride, 2 stride, ..., last_start.

    The last move is shorter where the stride does not divide the way, so that no step of the
    range is left out for that.
    """
    starts = [*range(0, last_start, config.window_stride), last_start]
    ends = [*accumulate(_rollouts_at(config, place, len(starts)) for place in range(len(starts)))]
    if config.roll_back:
        rollout_id %= ends[-1]
    return next(
        (start for start, end in zip(starts, ends, strict=True) if rollout_id < end), last_start
    )


def _rollouts_at(config: SdeStepsConfig, place: int, num_places: int) -> int:
    """Rollouts the window stays at a place: rollouts_per_window at the first, and with a decaying
    pace min_rollouts_per_window at the last."""
    first, last = config.rollouts_per_window, config.min_rollouts_per_window
    way = place / max(num_places - 1, 1)
    match config.window_pace:
        case "constant":
            return first
        case "decay":
            return round(first + way * (last - first))
        case "exp_decay":
            return round(first * (last / first) ** way)
