"""Which steps are stochastic, swept over every small schedule."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from unirl.config.schema import SdeStepsConfig
from unirl.core.errors import ConfigError
from unirl.samplers.window import select_sde_steps

FRACTIONS = (0.0, 0.25, 0.5, 0.6, 0.99, 1.0)


def selections(strategy: str) -> Iterator[tuple[SdeStepsConfig, int, range]]:
    """Every possible small setting: (config, number of steps, candidate steps)."""
    for total, start, end in product(range(2, 13), FRACTIONS, FRACTIONS):
        if start >= end:
            continue
        last = min(int(total * end), total - 1)
        candidates = range(int(total * start), last)
        sizes = [None] if strategy == "all" else range(1, len(candidates) + 1)
        for size in sizes if candidates else ():
            config = SdeStepsConfig.model_validate(
                {
                    "strategy": strategy,
                    "range": [start, end],
                    "num_steps": size,
                    "rollouts_per_window": 2,
                }
            )
            yield config, total, candidates


@pytest.mark.parametrize("strategy", ["all", "random", "window", "progressive"])
def test_steps_are_never_empty_in_range_ascending_and_without_the_last_step(strategy):
    for config, total, candidates in selections(strategy):
        expected = config.num_steps or len(candidates)
        for rollout_id in (0, 1, 7, 50):
            steps = select_sde_steps(config, total, rollout_id, seed=3)
            assert len(steps) == expected > 0
            assert set(steps) <= set(candidates)
            assert total - 1 not in steps
            assert list(steps) == sorted(set(steps))
            if strategy in ("window", "progressive"):
                assert steps == tuple(range(steps[0], steps[0] + expected))


@pytest.mark.parametrize("strategy", ["random", "window", "progressive"])
def test_steps_depend_on_seed_and_rollout_id_alone(strategy):
    config = SdeStepsConfig.model_validate({"strategy": strategy, "num_steps": 2})
    drawn = [select_sde_steps(config, 10, rollout_id, 0) for rollout_id in range(40)]
    again = [select_sde_steps(config, 10, rollout_id, 0) for rollout_id in reversed(range(40))]
    assert again[::-1] == drawn
    if strategy != "progressive":
        assert drawn != [select_sde_steps(config, 10, rollout_id, 1) for rollout_id in range(40)]


@pytest.mark.parametrize("strategy", ["random", "window"])
def test_every_step_of_the_range_is_drawn_sometimes(strategy):
    config = SdeStepsConfig.model_validate({"strategy": strategy, "num_steps": 3})
    drawn = {s for rollout_id in range(200) for s in select_sde_steps(config, 8, rollout_id, 0)}
    assert drawn == set(range(7))


def test_a_progressive_window_moves_by_one_step_and_stays_on_the_last():
    config = SdeStepsConfig.model_validate(
        {"strategy": "progressive", "num_steps": 3, "rollouts_per_window": 5}
    )
    starts = [select_sde_steps(config, 8, rollout_id, 0)[0] for rollout_id in range(40)]
    assert starts == [min(rollout_id // 5, 4) for rollout_id in range(40)]


@pytest.mark.parametrize(
    ("strategy", "size", "bounds"),
    [
        ("all", None, [0.9, 1.0]),
        ("random", 6, [0.0, 0.5]),
        ("window", 10, [0.0, 1.0]),
        ("progressive", None, [0.5, 0.5]),
    ],
)
def test_a_range_with_too_few_steps_is_refused_with_both_keys_named(strategy, size, bounds):
    config = SdeStepsConfig.model_validate(
        {"strategy": strategy, "num_steps": size, "range": bounds}
    )
    with pytest.raises(ConfigError, match=r"sde_steps\.range .* sampling\.sde_steps\.num_steps"):
        select_sde_steps(config, 10, 0, 0)
