"""Where the time went: phases as parts of the whole, and window by window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unirl.report.charts import Area, Axis, Drawing, draw_areas
from unirl.report.numbers import duration, share
from unirl.report.shown import ShownRun
from unirl.tracking.tracker import Row

_MOST_BARS = 200
PHASES = ("rollout", "reward", "train", "save", "other")
"""In the order of the loop. `other` is what no phase accounts for."""
COLOURS = {"rollout": 0, "reward": 1, "train": 2, "save": 3, "other": 6}
_TITLES = {"rollout": "Rollout", "reward": "Reward", "train": "Training", "save": "Saving"}


@dataclass(frozen=True)
class Part:
    """A phase of one run."""

    title: str
    colour: int
    fraction: float
    text: str


@dataclass(frozen=True)
class TimeUse:
    """One run's time."""

    label: str
    total: str
    parts: tuple[Part, ...]
    within: str
    """What lies within these phases: evaluations, weight syncs."""


def time_use(run: ShownRun) -> TimeUse | None:
    """None where nothing was timed."""
    rows = [row for row in run.files.of_kind("rollout") if "perf/total_seconds" in row.metrics]
    if not rows:
        return None
    windows = [phase_seconds(row) for row in rows]
    sums = {name: math.fsum(window[name] for window in windows) for name in PHASES}
    whole = math.fsum(sums.values())
    if not whole:
        return None
    parts = [
        Part(
            _TITLES.get(name, "Other"),
            COLOURS[name],
            seconds / whole,
            f"{duration(seconds)} · {share(seconds / whole)}",
        )
        for name, seconds in sums.items()
        if seconds >= 0.002 * whole
    ]
    return TimeUse(run.label, duration(whole), tuple(parts), _within(rows, whole))


def phase_seconds(row: Row) -> Mapping[str, float]:
    """Of one window, the evaluation and the save before it included.

    Evaluations count to rollout and reward, syncs to rollout: they are measured within them.
    """
    seconds = {name: _seconds(row, name) for name in ("rollout", "reward", "train", "save")}
    whole = sum(_seconds(row, name) for name in ("total", "evaluate", "save"))
    return {**seconds, "other": max(0.0, whole - sum(seconds.values()))}


def _seconds(row: Row, phase: str) -> float:
    value = row.metrics.get(f"perf/{phase}_seconds", 0.0)
    return value if math.isfinite(value) else 0.0


def _within(rows: Sequence[Row], whole: float) -> str:
    words = {"evaluate": "evaluations", "sync": "weight syncs", "doctor": "the doctor"}
    sums = {text: math.fsum(_seconds(row, phase) for row in rows) for phase, text in words.items()}
    parts = [
        f"{text} {duration(seconds)} ({share(seconds / whole)})"
        for text, seconds in sums.items()
        if seconds >= 0.002 * whole
    ]
    return f"Within these: {', '.join(parts)}." if parts else ""


def per_window(run: ShownRun) -> Drawing | None:
    """Seconds of each window by phase; of many windows, means over stretches of them."""
    rows = [row for row in run.files.of_kind("rollout") if "perf/total_seconds" in row.metrics]
    if len(rows) < 3:
        return None
    length = math.ceil(len(rows) / _MOST_BARS)
    stretches = [rows[start : start + length] for start in range(0, len(rows), length)]
    xs = [float(stretch[-1].rollout + 1) for stretch in stretches]
    floor = [0.0] * len(xs)
    areas = []
    for name in PHASES:
        seconds = [
            math.fsum(phase_seconds(row)[name] for row in stretch) / len(stretch)
            for stretch in stretches
        ]
        top = [low + more for low, more in zip(floor, seconds, strict=True)]
        if sum(seconds) >= 0.002 * sum(top):
            areas.append(Area(_TITLES.get(name, "Other"), xs, floor, top, COLOURS[name]))
        floor = top
    axis = Axis("rollouts", text=lambda value: f"rollout {value:,.0f}", whole=True)
    return draw_areas(areas, axis, duration) if areas else None
