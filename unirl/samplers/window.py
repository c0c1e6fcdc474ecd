"""Which steps are stochastic: a pure function of the rollout id, so a resume repeats it."""

from __future__ import annotations

import random

from unirl.config.schema import SdeStepsConfig
from unirl.core.errors import ConfigError


def select_sde_steps(
    config: SdeStepsConfig, num_inference_steps: int, rollout_id: int, seed: int
) -> tuple[int, ...]:
    """The S steps of this rollout, ascending, never empty; the same for all its samples.

    Raises ConfigError when the range holds fewer steps than asked for.
    """
    steps = config.candidates(num_inference_steps)
    num_steps = len(steps) if config.num_steps is None else config.num_steps
    if not 1 <= num_steps <= len(steps):
        raise ConfigError(
            f"sampling.sde_steps asks for {num_steps} of the {len(steps)} steps that "
            f"range={list(config.range)} selects of {num_inference_steps}; widen "
            "sampling.sde_steps.range or lower sampling.sde_steps.num_steps."
        )
    draw = random.Random(f"{seed}/sde-steps/{rollout_id}")
    last_start = len(steps) - num_steps
    match config.strategy:
        case "all":
            return tuple(steps)
        case "random":
            return tuple(sorted(draw.sample(steps, num_steps)))
        case "window":
            start = draw.randint(0, last_start)
        case "progressive":
            start = min(rollout_id // config.rollouts_per_window, last_start)
    return tuple(steps[start : start + num_steps])
