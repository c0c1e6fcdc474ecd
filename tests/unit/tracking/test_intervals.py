"""Intervals over prompts: Student's t on prompt means, paired where prompts are shared."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from unirl.tracking.evaluations import EvaluatedSample
from unirl.tracking.intervals import (
    confidence_interval,
    paired_changes,
    scores_by_prompt,
    t_quantile,
)


def samples(rewards: list[list[float | None]], judge: float = 0.0) -> list[EvaluatedSample]:
    """rewards[prompt][sample]."""
    return [
        EvaluatedSample(p, f"prompt {p}", g, r, {"ocr": 2.0 * (r or 0)}, {"light": judge + p})
        for p, group in enumerate(rewards)
        for g, r in enumerate(group)
    ]


@pytest.mark.parametrize(
    ("degrees", "table"),
    [(1, 12.7062), (4, 2.77645), (5, 2.57058), (9, 2.26216), (30, 2.04227), (255, 1.96931)],
)
def test_quantiles_are_those_of_the_tables(degrees, table):
    assert t_quantile(degrees) == pytest.approx(table, abs=3e-4)


def test_the_interval_is_the_mean_and_t_standard_errors():
    found = confidence_interval([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5
    assert found.half_width == pytest.approx(3.18245 * statistics.stdev([1, 2, 3, 4]) / 2)
    assert (found.low, found.high) == (2.5 - found.half_width, 2.5 + found.half_width)


def test_one_prompt_has_a_mean_and_no_interval():
    found = confidence_interval([0.25])
    assert found.mean == 0.25
    assert math.isnan(found.half_width)
    assert not found.low > 0, "an interval that is not known excludes nothing"


def test_19_of_20_intervals_hold_the_true_mean():
    generator = random.Random(0)
    draws = [confidence_interval([generator.gauss(3, 2) for _ in range(8)]) for _ in range(2000)]
    covered = sum(found.low <= 3 <= found.high for found in draws)
    assert 0.935 < covered / len(draws) < 0.965


def test_samples_of_a_prompt_are_averaged_first_so_more_of_them_give_no_false_certainty():
    once = scores_by_prompt(samples([[0.0], [1.0]]))
    often = scores_by_prompt(samples([[0.0] * 9, [1.0] * 9]))
    assert (
        once
        == often
        == {
            "reward": {0: 0.0, 1: 1.0},
            "ocr": {0: 0.0, 1: 2.0},
            "judge_light": {0: 0.0, 1: 1.0},
        }
    )


def test_a_change_is_taken_prompt_by_prompt():
    before = samples([[0.0], [5.0], [9.0]])
    after = samples([[0.1], [5.1], [9.1]], judge=-1.0)
    changes = paired_changes(before, after)
    assert changes["reward"].mean == pytest.approx(0.1)
    assert changes["reward"].low > 0.09, "prompts differ by far more than that"
    assert changes["judge_light"].high == changes["judge_light"].low == -1


def test_a_prompt_that_one_evaluation_lacks_is_left_out_of_the_change():
    changes = paired_changes(samples([[0.0], [None], [1.0]]), samples([[0.5], [9.0], [2.5]]))
    assert changes["reward"].num_prompts == 2
    assert changes["reward"].mean == 1.0
