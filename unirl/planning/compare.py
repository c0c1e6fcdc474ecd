"""A run beside its plan: the same moves of the same bytes, or where they part."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from unirl.planning.plan import Plan
from unirl.residency.plan import Line
from unirl.residency.problem import size_text

COMPARED = (
    "rollout",
    "during",
    "role",
    "move",
    "cause",
    "rule",
    "component",
    "moved_bytes",
    "dropped_bytes",
    "device_bytes",
    "host_bytes",
)
"""Fields of a move that a plan knows."""
NUM_SHOWN = 10


def comparison(plan: Plan, directory: Path) -> tuple[list[str], bool]:
    """What to print, and whether the run did exactly what the plan says."""
    run = _json_lines(directory / "transitions.jsonl")
    differing = list(_differences(plan.notes.lines, run))
    lines = [f"{directory}: {len(run)} moves, planned {len(plan.notes.lines)}"]
    lines += [f"  {text}" for text in differing[:NUM_SHOWN]]
    if len(differing) > NUM_SHOWN:
        lines.append(f"  and {len(differing) - NUM_SHOWN} more")
    if differing and _is_beginning(run, plan.notes.lines):
        lines.append("  all of them as planned: the run ended early")
    if not differing:
        lines.append("  the same moves, in the same order, of the same bytes")
    return [*lines, *_peaks(plan, run, directory)], not differing


def _differences(planned: Sequence[Line], run: Sequence[Line]) -> Iterator[str]:
    for number, (ours, theirs) in enumerate(zip_longest(planned, run), start=1):
        if ours is None:
            yield f"move {number}, not planned: {_text(theirs)}"
            continue
        if theirs is None:
            yield f"move {number}, not made: {_text(ours)}"
            continue
        fields = [name for name in COMPARED if ours.get(name) != theirs.get(name)]
        if fields:
            parts = (f"{name} {ours.get(name)} -> {theirs.get(name)}" for name in fields)
            yield f"move {number}, {_text(ours)}: planned -> run: {', '.join(parts)}"


def _is_beginning(run: Sequence[Line], planned: Sequence[Line]) -> bool:
    return len(run) < len(planned) and not any(_differences(planned[: len(run)], run))


def _text(line: Line) -> str:
    return f"{line['role']} {line['move']} ({line['component'] or 'nothing'})"


def _peaks(plan: Plan, run: Sequence[Line], directory: Path) -> list[str]:
    """The most that components held, and what the device really held where it was measured."""
    planned = max((line.get("device_bytes", 0) for line in plan.notes.lines), default=0)
    held = max((line.get("device_bytes", 0) for line in run), default=0)
    lines = [f"  most held by components: planned {size_text(planned)}, run {size_text(held)}"]
    measured = measured_peaks(directory)
    for peak in plan.peaks:
        if peak.kind.value in measured:
            real = measured[peak.kind.value]
            lines.append(
                f"  {peak.kind.value}: planned {size_text(peak.total_bytes)}, measured "
                f"{size_text(real)} ({real / peak.total_bytes:.0%})"
            )
    return lines


def measured_peaks(directory: Path) -> dict[str, int]:
    """By phase, from the `memory/<phase>_peak_bytes` of metrics.jsonl; empty on a CPU."""
    peaks: dict[str, int] = {}
    for row in _json_lines(directory / "metrics.jsonl"):
        for name, value in row.items():
            if name.startswith("memory/"):
                phase = name.removeprefix("memory/").removesuffix("_peak_bytes").replace("_", " ")
                peaks[phase] = max(peaks.get(phase, 0), int(value))
    return peaks


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]
