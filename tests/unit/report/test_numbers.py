"""Numbers as a person reads them."""

from __future__ import annotations

import math

import pytest

from unirl.report.numbers import change, count, duration, figure, share


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12 ms"),
        (3.21, "3.2 s"),
        (59.7, "1 min"),
        (185, "3 min 5 s"),
        (7800, "2 h 10 min"),
        (356_400, "4 d 3 h"),
    ],
)
def test_durations_have_the_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.62286, "0.6229"), (12.3456, "12.35"), (1024, "1,024"), (2e-4, "2.0e−4"), (-3.5, "−3.500")],
)
def test_figures_have_about_four_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_what_is_no_number_says_so() -> None:
    assert figure(math.nan) == "not a number"
    assert change(math.nan) == "not a number"
    assert change(0.25) == "+0.250"
    assert change(-0.25) == "−0.250"


def test_counts_and_shares_are_short() -> None:
    assert [count(value) for value in (950, 12_500, 3_000_000)] == ["950", "12.5 k", "3 M"]
    assert [share(value) for value in (0.0, 0.012, 0.43)] == ["0%", "1.2%", "43%"]
