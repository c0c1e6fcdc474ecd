"""The learning-rate schedule."""

from __future__ import annotations

import pytest

from unirl.config.schema import SchedulerConfig
from unirl.train.optimizer import learning_rate_factor


def factors(num_steps: int, run_steps: int, **config: object) -> list[float]:
    schedule = SchedulerConfig.model_validate(config)
    return [learning_rate_factor(schedule, step, run_steps) for step in range(num_steps)]


def test_constant_is_one_throughout():
    assert factors(5, 4, type="constant") == [1, 1, 1, 1, 1]


def test_warmup_rises_in_equal_steps_and_never_starts_at_zero():
    assert factors(6, 100, type="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_linear_falls_to_zero_at_the_total_and_stays():
    assert factors(6, 4, type="linear") == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0])
    assert factors(6, 99, type="linear", total_steps=4) == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0])


def test_cosine_is_half_way_down_in_the_middle():
    assert factors(5, 4, type="cosine")[::2] == pytest.approx([1, 0.5, 0])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_decay_begins_after_the_warmup(kind):
    found = factors(8, 6, type=kind, warmup_steps=2)
    assert found[:3] == [0.5, 1, 1]
    assert found[2:7] == sorted(found[2:7], reverse=True)
    assert found[6:] == pytest.approx([0, 0])


def test_a_warmup_longer_than_the_run_does_not_divide_by_zero():
    assert factors(3, 2, type="cosine", warmup_steps=2) == pytest.approx([0.5, 1, 1])
