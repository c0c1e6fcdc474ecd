"""Fewer points, every peak."""

from __future__ import annotations

import math
import random

from unirl.report.thinning import kept_indices, running_mean


def test_the_highest_and_lowest_of_20_000_values_are_kept_and_few_others() -> None:
    noise = random.Random(1)
    values = [noise.gauss(0, 1) for _ in range(20_000)]
    values[7_001], values[12_345] = 90.0, -90.0
    kept = kept_indices(values, 500)
    assert len(kept) <= 500
    assert {0, 7_001, 12_345, 19_999} <= set(kept)
    assert kept == sorted(set(kept))


def test_few_values_are_all_kept() -> None:
    assert kept_indices([1.0, math.nan, 3.0], 500) == [0, 1, 2]


def test_a_long_gap_stays_a_gap() -> None:
    values = [1.0] * 1_000 + [math.nan] * 1_000 + [1.0] * 1_000
    kept = kept_indices(values, 100)
    assert any(math.isnan(values[place]) for place in kept)


def test_a_running_mean_leaves_out_what_is_no_number() -> None:
    assert running_mean([1.0, math.nan, 3.0, 5.0], 3) == [1.0, 2.0, 4.0, 4.0]
