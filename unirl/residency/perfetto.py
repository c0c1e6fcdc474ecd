"""Moves and phases as a trace that opens in Perfetto (ui.perfetto.dev) or chrome://tracing.

Slices lie on three tracks: what the run does, bytes on their way to the device, and bytes on their
way off it. Counters show what components hold on the device and on the host. A plan writes the same
events with a clock of its own, so both open side by side.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.residency.plan import Line, PhaseNote, handoffs, is_overlapped, seconds_of, traffic
from unirl.residency.timeline import PhaseKind
from unirl.tracking.files import output_errors

Event = dict[str, Any]

TRACKS = {"phases": 1, "onload": 2, "offload": 3}
NAMES = {"phases": "phases", "onload": "host to device", "offload": "device to host"}
PLANNED_PHASE_SECONDS = 1.0
"""How long each phase of a plan is drawn: its work is not estimated."""


def head(process: int, name: str) -> Iterator[Event]:
    """Names of the process and its tracks."""
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for track, number in TRACKS.items():
        args = {"name": NAMES[track]}
        yield {"ph": "M", "pid": process, "tid": number, "name": "thread_name", "args": args}


def phase_event(process: int, name: str, start: float, seconds: float) -> Event:
    return _slice(process, TRACKS["phases"], name, start, seconds, {})


def move_events(process: int, line: Line, start: float, seconds: float) -> Iterator[Event]:
    """A slice for one line of transitions.jsonl and the counters after it."""
    if line["component"] is None:
        return
    args = {key: line[key] for key in ("cause", "rule", "version", "moved_bytes", "dropped_bytes")}
    name = f"{line['component']} {line['from']} to {line['to']}"
    yield _slice(process, TRACKS[line["move"]], name, start, seconds, args)
    held = {place: line[f"{place}_bytes"] for place in ("device", "host")}
    yield counter(process, start + seconds, held)


def counter(process: int, at: float, values: Mapping[str, int]) -> Event:
    return {"ph": "C", "pid": process, "name": "bytes", "ts": at * 1e6, "args": dict(values)}


def _slice(
    process: int, track: int, name: str, start: float, seconds: float, args: Mapping[str, Any]
) -> Event:
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        "name": name,
        "ts": start * 1e6,
        "dur": seconds * 1e6,
        "args": dict(args),
    }


def planned_events(
    notes: Sequence[PhaseNote],
    lines: Sequence[Line],
    rates: Mapping[str, float],
    workspace: Mapping[PhaseKind, int],
    budget_bytes: int | None,
) -> Iterator[Event]:
    """A plan's trace: moves at `rates` (bytes per second by `onload` and `offload`), and phases of
    one length. The counter `in all` is components and workspace together."""
    yield from head(0, "plan")
    now = 0.0
    written = 0
    for note in notes:
        for group in handoffs(lines[written : note.num_lines]):
            yield from _planned_moves(group, now, rates)
            now += seconds_of(group, rates["onload"], rates["offload"])
        written = note.num_lines
        yield phase_event(0, note.kind.value, now, PLANNED_PHASE_SECONDS)
        held = sum(note.device_bytes.values())
        in_all = {"in all": held + workspace[note.kind]}
        if budget_bytes is not None:
            in_all["budget"] = budget_bytes
        yield {**counter(0, now, in_all), "name": "phase"}
        now += PLANNED_PHASE_SECONDS
        yield {**counter(0, now, {**in_all, "in all": held}), "name": "phase"}


def _planned_moves(
    group: Sequence[Line], start: float, rates: Mapping[str, float]
) -> Iterator[Event]:
    """Moves of one handoff; each way takes all of its time where both go at once."""
    whole = seconds_of(group, rates["onload"], rates["offload"])
    for move, rate in rates.items():
        way, now = [line for line in group if line["move"] == move], start
        moved = traffic(way).moved_bytes
        slower = whole * rate / moved if moved and is_overlapped(group) else 1.0
        for line in way:
            seconds = line["moved_bytes"] / rate * slower
            yield from move_events(0, line, now, seconds)
            now += seconds


class TraceFile:
    """Appends a run's events to `trace.json` as they happen.

    The array is never closed, which both viewers allow, so that an interrupted or resumed run has
    a whole trace too.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._leaving: list[Line] = []
        """Lines of a handoff that is not over."""
        with output_errors(path):
            self._file = path.open("a", encoding="utf-8")
            if self._file.tell() == 0:
                self._file.write("[\n")
        for event in head(rank, f"rank {rank}"):
            self._write(event)

    def phase(self, name: str, seconds: float) -> None:
        """A phase that has just ended."""
        self._write(phase_event(self._rank, name, time.time() - seconds, seconds))

    def moves(self, lines: Sequence[Line]) -> None:
        """A transition that has just ended; of an overlapped handoff, its last one ends them."""
        if is_overlapped(lines) and lines[0]["move"] == "offload":
            self._leaving += lines
            return
        self._draw(self._leaving)
        self._draw(lines)
        self._leaving = []

    def _draw(self, lines: Sequence[Line]) -> None:
        now = time.time() - sum(line["seconds"] for line in lines)
        for line in lines:
            for event in move_events(self._rank, line, now, line["seconds"]):
                self._write(event)
            now += line["seconds"]

    def _write(self, event: Event) -> None:
        with output_errors(self._path):
            self._file.write(json.dumps(event) + ",\n")

    def close(self) -> None:
        with output_errors(self._path):
            self._file.close()
