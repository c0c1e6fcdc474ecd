"""Wall-clock time per phase of a window, the most device memory it took, and what was counted."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from unirl.tracking.running import Running


class MemoryMeter(Protocol):
    """The device's own account of allocated bytes."""

    def reset(self) -> None:
        """Forget the peak: from now on it starts at what is allocated now."""
        ...

    def allocated_bytes(self) -> int | None:
        """What is allocated now; None where nothing is measured."""
        ...

    def peak_bytes(self) -> int | None:
        """Most that was allocated since the reset; None where nothing is measured."""
        ...


class NoMeter:
    """A device without an account, as the CPU."""

    def reset(self) -> None:
        return

    def allocated_bytes(self) -> int | None:
        return None

    def peak_bytes(self) -> int | None:
        return None


class PhaseClock:
    """Sums the seconds spent in each named phase, and keeps its peak, until asked."""

    def __init__(
        self,
        meter: MemoryMeter,
        ended: Callable[[str, float], None] = lambda name, seconds: None,
        totals: Callable[[], Mapping[str, int]] = dict,
        running: Running | None = None,
    ) -> None:
        """`ended` is told the name and the seconds of every phase that is over; `totals` gives
        counts so far, whose growth in each phase is a metric; `running` is kept up to date."""
        self._meter = meter
        self._ended = ended
        self._totals = totals
        self._running = Running() if running is None else running
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._peaks: defaultdict[str, int] = defaultdict(int)
        self._open: list[int] = []
        """Peaks so far of the phases that are going on, outermost first."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started, before = time.perf_counter(), self._totals()
        self._note_peak()
        self._open.append(0)
        self._running.begin(name)
        try:
            yield
        finally:
            self._running.end()
            seconds = time.perf_counter() - started
            self._note_peak()
            self._peaks[name] = max(self._peaks[name], self._open.pop())
            self._seconds[name] += seconds
            for what, total in self._totals().items():
                self._counts[f"{name}_{what}"] += total - before[what]
            self._ended(name, seconds)

    def _note_peak(self) -> None:
        """Give the peak since the last look to every phase that was going on meanwhile."""
        peak = self._meter.peak_bytes() or 0
        self._open = [max(earlier, peak) for earlier in self._open]
        self._meter.reset()

    def take_metrics(self) -> dict[str, float]:
        """`perf/<phase>_seconds`, `perf/<phase>_<count>` and `memory/<phase>_peak_bytes` since the
        last call."""
        metrics = {f"perf/{name}_seconds": value for name, value in self._seconds.items()}
        metrics |= {f"perf/{name}": float(n) for name, n in self._counts.items() if n}
        for name, peak in self._peaks.items():
            if peak:
                metrics[f"memory/{name}_peak_bytes"] = float(peak)
        self._seconds.clear()
        self._counts.clear()
        self._peaks.clear()
        return metrics
