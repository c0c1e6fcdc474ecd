"""One number from several of the same metric: over optimizer steps, or over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def pool_metrics(every: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of the first one's names: extremes where the name says so, else means where there are any."""
    pooled = {}
    for name in every[0]:
        values = [metrics[name] for metrics in every if name in metrics]
        if name.endswith("_min"):
            pooled[name] = min(values)
        elif name.endswith("_max"):
            pooled[name] = max(values)
        else:
            pooled[name] = sum(values) / len(values)
    return pooled
