"""Fewer points than were logged, without losing a peak."""

from __future__ import annotations

import math
from collections.abc import Sequence


def kept_indices(values: Sequence[float], most: int) -> list[int]:
    """Places of at most `most` values, ascending: the first, the last, and the lowest and highest
    of each of equally long stretches between them. All of them where there are few enough.

    A stretch without a number keeps its first place, so that the gap can be seen.
    """
    if len(values) <= most:
        return list(range(len(values)))
    inner = range(1, len(values) - 1)
    num_stretches = max(1, (most - 2) // 2)
    kept = {0, len(values) - 1}
    for number in range(num_stretches):
        start = inner.start + number * len(inner) // num_stretches
        end = inner.start + (number + 1) * len(inner) // num_stretches
        finite = [place for place in range(start, end) if math.isfinite(values[place])]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        elif start < end:
            kept.add(start)
    return sorted(kept)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and its neighbours, `width` in all where there are as many; what is no
    number is left out."""
    half = width // 2
    totals, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        totals.append(totals[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    means = []
    for place in range(len(values)):
        start, end = max(0, place - half), min(len(values), place + half + 1)
        number = counts[end] - counts[start]
        means.append((totals[end] - totals[start]) / number if number else math.nan)
    return means
