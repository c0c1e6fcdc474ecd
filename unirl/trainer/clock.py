"""Wall-clock time per phase of a window."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Sums the seconds spent in each named phase until asked."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - started

    def take_metrics(self) -> dict[str, float]:
        """`perf/<phase>_seconds` since the last call."""
        metrics = {f"perf/{name}_seconds": value for name, value in self._seconds.items()}
        self._seconds.clear()
        return metrics
