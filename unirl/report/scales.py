"""From values to places on an axis: its range, its ticks and their labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from unirl.report.numbers import MINUS, POWERS

_STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True)
class Tick:
    place: float
    """From 0, the beginning of the axis, to 1."""
    label: str


@dataclass(frozen=True)
class Scale:
    """A linear axis."""

    low: float
    high: float

    @staticmethod
    def around(values: Iterable[float], margin: float = 0.0, floor: float | None = None) -> Scale:
        """Holds all finite values, with a margin on both sides as a part of their span. Where they
        are all the same, or there are none, it still has a width.

        `floor`: no margin goes below it; for what cannot be less.
        """
        finite = [value for value in values if math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        if high - low <= 1e-12 * max(abs(low), abs(high)):
            half = abs(low) / 2 or 0.5
            scale = Scale(low - half, high + half)
        else:
            room = margin * (high - low)
            scale = Scale(low - room, high + room)
        if floor is not None and low >= floor:
            scale = Scale(max(scale.low, floor), scale.high)
        return scale

    def place(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int, whole: bool = False) -> list[Tick]:
        """At round values within the axis, at most `most`; `whole`: at whole numbers only."""
        values = round_values(self.low, self.high, most, whole)
        return [
            Tick(self.place(value), label)
            for value, label in zip(values, labels(values), strict=True)
        ]


def round_values(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten from low to high: as many as are allowed."""
    rough = (high - low) / most
    power = 10.0 ** max(math.floor(math.log10(rough)), 0 if whole else -300)
    for step in [power * part for part in _STEPS] + [power * 20, power * 50]:
        if whole and step != round(step):
            continue
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [number * step for number in range(first, last + 1)]
    return []


def labels(values: Sequence[float]) -> list[str]:
    """With the digits that tell them apart, the same for all."""
    largest = max((abs(value) for value in values), default=0.0)
    step = min((b - a for a, b in pairwise(values)), default=largest)
    if largest and largest < 1e-3:
        return [_scientific(value, step, largest) for value in values]
    size, letter = next(((s, f" {x}") for s, x in POWERS if largest >= max(s, 1e4)), (1.0, ""))
    decimals = _decimals(step / size)
    texts = [f"{value / size:.{decimals}f}{letter}" for value in values]
    return [
        "0" if abs(value) < step / 1000 and letter else text.replace("-", MINUS)
        for value, text in zip(values, texts, strict=True)
    ]


def _scientific(value: float, step: float, largest: float) -> str:
    """2e-4, all with the exponent of the largest."""
    if abs(value) < step / 1000:
        return "0"
    exponent = math.floor(math.log10(largest))
    mantissa = value / 10.0**exponent
    decimals = _decimals(step / 10.0**exponent)
    return f"{mantissa:.{decimals}f}e{exponent}".replace("-", MINUS)


def _decimals(step: float) -> int:
    """Digits after the point that a multiple of the step needs."""
    if step <= 0:
        return 0
    for decimals in range(12):
        scaled = step * 10**decimals
        if round(scaled) >= 1 and abs(scaled - round(scaled)) < 1e-4 * scaled:
            return decimals
    return 12
