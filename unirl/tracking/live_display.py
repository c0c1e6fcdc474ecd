"""The lines below the log while a run goes on in a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unirl.tracking.line_fields import BAR_FIELDS, fields
from unirl.tracking.running import Running
from unirl.tracking.time_left import TimeLeft
from unirl.tracking.tracker import Row

_PHASES = ("rollout", "reward", "sync", "train", "evaluate", "save")
_MIN_BAR_WIDTH = 8
_MIN_WIDTH_FOR_ELAPSED = 60


class LiveDisplay:
    """How far the run is, what it learned last and where the time went, and what it does now.

    A narrow terminal gets fewer fields, none of them cut.
    """

    def __init__(
        self, num_rollouts: int, first_rollout: int, time_left: TimeLeft, running: Running
    ) -> None:
        self._num_rollouts = num_rollouts
        self._done = first_rollout
        self._time_left = time_left
        self._running = running
        self._has_ended = False
        self._began = time.monotonic()
        self._ends_at: float | None = None
        self._numbers: list[str] = []
        self._phases: list[str] = []

    def add(self, row: Row) -> None:
        self._time_left.add(row)
        seconds = self._time_left.seconds()
        self._ends_at = None if seconds is None else time.monotonic() + seconds
        if row.kind == "rollout":
            self._done = row.rollouts_done
            # Over resumes: this start's own clock would begin anew.
            so_far = row.metrics.get("progress/wall_seconds", 0.0)
            self._began = min(self._began, time.monotonic() - so_far)
            self._numbers = list(fields(row.metrics, BAR_FIELDS))
            self._phases = list(_phase_fields(row.metrics))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        yield self._how_far(width)
        for line in (self._numbers, self._phases):
            if line:
                yield Text(_fit(line, width), no_wrap=True)
        if not self._has_ended:
            yield Text(_fit(self._now(), width), no_wrap=True)

    def end(self) -> None:
        """What stays on the screen is about the past."""
        self._has_ended = True

    def _now(self) -> list[str]:
        phase = self._running.phase()
        if phase is None:
            return ["now", "between phases"]
        name, seconds = phase
        return ["now", name, f"for {_clock(seconds)}"]

    def _how_far(self, width: int) -> Table | Text:
        now = time.monotonic()
        done = f"rollout {self._done}/{self._num_rollouts}"
        seconds_left = 0.0 if self._ends_at is None else self._ends_at - now
        left = f"{_clock(seconds_left)} left" if seconds_left > 0 else ""
        times = [f"{_clock(now - self._began)} so far"] if width >= _MIN_WIDTH_FOR_ELAPSED else []
        right = ", ".join([*times, *([left] if left else [])])
        bar_width = width - len(done) - len(right) - (2 if right else 1)
        if bar_width < _MIN_BAR_WIDTH:
            return Text(_fit([done, left], width), no_wrap=True)
        line = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
        bar = ProgressBar(self._num_rollouts, self._done, width=bar_width)
        line.add_row(done, bar, right)
        return line


def _phase_fields(metrics: Mapping[str, float]) -> Iterator[str]:
    """Seconds of one window, and of an evaluation or save before it; parts of others are not
    repeated."""
    for phase in _PHASES:
        seconds = metrics.get(f"perf/{phase}_seconds")
        if seconds is not None and seconds >= 0.005:
            yield f"{phase}={seconds:.2f}s" if seconds < 10 else f"{phase}={seconds:.0f}s"


def _fit(fields: Iterable[str], width: int) -> str:
    """As many whole fields as there is room for."""
    line = ""
    for field in fields:
        longer = f"{line} {field}" if line else field
        if len(longer) > width:
            break
        line = longer
    return line


def _clock(seconds: float) -> str:
    """ "1:02:03"; at least 0."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"
