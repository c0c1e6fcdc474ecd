"""Axes: round ticks within them, labels that tell ticks apart."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.report.scales import Scale, labels, round_values


@given(
    low=st.floats(-1e6, 1e6),
    span=st.floats(1e-7, 1e6),
    most=st.integers(2, 8),
)
def test_ticks_lie_within_the_axis_and_are_few_and_told_apart(
    low: float, span: float, most: int
) -> None:
    scale = Scale(low, low + span * max(1.0, abs(low)))
    ticks = scale.ticks(most)
    assert 1 <= len(ticks) <= most
    assert all(-1e-6 <= tick.place <= 1 + 1e-6 for tick in ticks)
    assert len({tick.label for tick in ticks}) == len(ticks)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0, 122, ["0", "25", "50", "75", "100"]),
        (-2.1e-4, 2.1e-4, ["−2e-4", "−1e-4", "0", "1e-4", "2e-4"]),
        (0, 61_000, ["0", "20 k", "40 k", "60 k"]),
    ],
)
def test_labels_are_what_a_person_would_write(low: float, high: float, expected: list[str]) -> None:
    texts = [label.replace("e−", "e-") for label in labels(round_values(low, high, 6))]
    assert texts == expected


@pytest.mark.parametrize(
    ("high", "expected"), [(1, ["0", "1"]), (3, ["0", "1", "2", "3"]), (16, ["0", "5", "10", "15"])]
)
def test_what_is_counted_has_whole_ticks(high: float, expected: list[str]) -> None:
    assert [tick.label for tick in Scale(0, high).ticks(6, whole=True)] == expected


def test_an_axis_of_equal_or_missing_values_still_has_a_width() -> None:
    for values in ([3.0, 3.0], [0.0], [], [math.nan]):
        scale = Scale.around(values)
        assert scale.high > scale.low


def test_no_margin_goes_below_what_cannot_be_less() -> None:
    assert Scale.around([0.0, 1.0], margin=0.1, floor=0.0).low == 0.0
    assert Scale.around([-0.5, 1.0], margin=0.1, floor=0.0).low < -0.5
