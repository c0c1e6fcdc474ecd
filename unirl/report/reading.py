"""A run directory as values. What is missing or cut off is left out, and a note says so.

Files that a resume has set aside are no part of a run and are not read.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from unirl.core.errors import UnirlError
from unirl.report.numbers import plural
from unirl.tracking.evaluations import (
    MAIN_SUITE,
    EvaluatedSample,
    evaluation_file,
    evaluation_steps,
)
from unirl.tracking.tracker import Row

Json = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """The samples of the main suite after so many rollouts."""

    step: int
    samples: tuple[EvaluatedSample, ...]


@dataclass(frozen=True)
class Finding:
    """What the doctor said about one thing, in its words."""

    name: str
    value: str
    is_fine: bool
    sentence: str
    key: str


@dataclass(frozen=True)
class LogEntry:
    time: datetime
    level: str
    message: str


@dataclass(frozen=True)
class RunFiles:
    """What a run directory holds."""

    path: Path
    config: Json
    """As config.yaml has it; empty where there is none."""
    rows: tuple[Row, ...]
    evaluations: tuple[Evaluation, ...]
    """The first and the last one whose samples were written down; one where there is one."""
    findings: tuple[Finding, ...] | None
    """None where nobody looked."""
    moves: tuple[Json, ...]
    """Lines of transitions.jsonl."""
    events: tuple[Json, ...]
    """Slices and counters of trace.json."""
    log: tuple[LogEntry, ...]
    is_held: bool
    """Whether a process has the directory now."""
    notes: tuple[str, ...]
    """What could not be read."""

    @property
    def name(self) -> str:
        return str(self.config.get("run_name") or self.path.name)

    @property
    def has_held_out_prompts(self) -> bool:
        """Whether evaluations have prompts of their own (data.eval)."""
        return not self.config or (self.config.get("data") or {}).get("eval") is not None

    def of_kind(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row.kind == kind]


def read_run(path: Path) -> RunFiles:
    """Read a run directory, whatever state it is in.

    Raises:
        UnirlError: it is no folder, or has neither config.yaml nor metrics.jsonl.
    """
    path = path.expanduser()
    if not path.is_dir():
        raise UnirlError(f"{path} is no folder. Give a run directory: <output_dir>/<run_name>.")
    if not (path / "config.yaml").exists() and not (path / "metrics.jsonl").exists():
        raise UnirlError(
            f"{path} is no run: it has neither config.yaml nor metrics.jsonl."
            f"{_runs_below(path)} Give a run directory: <output_dir>/<run_name>."
        )
    notes: list[str] = []
    return RunFiles(
        path=path.resolve(),
        config=_config(path / "config.yaml", notes),
        rows=tuple(_rows(path / "metrics.jsonl", notes)),
        evaluations=tuple(_evaluations(path, notes)),
        findings=_findings(path / "doctor.json", notes),
        moves=tuple(_moves(path / "transitions.jsonl", notes)),
        events=tuple(_events(path / "trace.json")),
        log=tuple(_log_entries(path / "run.log")),
        is_held=_is_held(path / ".lock"),
        notes=tuple(notes),
    )


def _runs_below(path: Path) -> str:
    runs = sorted(child.parent.name for child in path.glob("*/config.yaml"))
    if not runs:
        return ""
    return f" There are runs below it: {', '.join(runs[:5])}{', ...' if len(runs) > 5 else ''}."


def _config(path: Path, notes: list[str]) -> Json:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append("config.yaml is missing, so settings are unknown.")
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        notes.append(
            f"config.yaml cannot be read ({type(error).__name__}), so settings are unknown."
        )
        return {}
    return config if isinstance(config, dict) else {}


def _lines(path: Path, notes: list[str]) -> Iterator[Json]:
    """The objects of a file of JSON lines; what is none is counted in a note."""
    if not path.is_file():
        return
    bad: list[int] = []
    number = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                fields = json.loads(line)
            except ValueError:
                bad.append(number)
                continue
            if isinstance(fields, dict):
                yield fields
            else:
                bad.append(number)
    if bad == [number]:
        notes.append(
            f"The last line of {path.name} is cut off, as a kill or a run that is still writing "
            "leaves it; it is left out."
        )
    elif bad:
        notes.append(f"{plural(len(bad), 'line')} of {path.name} cannot be read and are left out.")


def _rows(path: Path, notes: list[str]) -> Iterator[Row]:
    if not path.is_file():
        notes.append("metrics.jsonl is missing: nothing was measured yet.")
        return
    for fields in _lines(path, notes):
        try:
            kind, rollout, step = (
                fields.pop(name) for name in ("kind", "rollout", "optimizer_step")
            )
            numbers = {name: float(value) for name, value in fields.items()}
        except (KeyError, TypeError, ValueError):
            notes.append("A line of metrics.jsonl is no row of metrics; it is left out.")
            continue
        yield Row(kind, rollout, step, numbers)


_MOVE = {"component", "role", "move", "moved_bytes", "dropped_bytes", "seconds"}


def _moves(path: Path, notes: list[str]) -> Iterator[Json]:
    strange = 0
    for line in _lines(path, notes):
        if line.keys() >= _MOVE and (line["component"] is None or "device_bytes" in line):
            yield line
        else:
            strange += 1
    if strange:
        notes.append(f"{plural(strange, 'line')} of {path.name} have fields missing; left out.")


def _evaluations(run: Path, notes: list[str]) -> Iterator[Evaluation]:
    steps = evaluation_steps(run)
    for step in sorted({steps[0], steps[-1]} if steps else ()):
        path = evaluation_file(run, MAIN_SUITE, step)
        try:
            samples = tuple(EvaluatedSample(**fields) for fields in _lines(path, notes))
        except TypeError:
            notes.append(f"{path.name} was written by another version and is left out.")
            continue
        if samples:
            yield Evaluation(step, samples)


def _findings(path: Path, notes: list[str]) -> tuple[Finding, ...] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["findings"]
        return tuple(Finding(**finding) for finding in found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        notes.append("doctor.json cannot be read.")
        return None


def _events(path: Path) -> Iterator[Json]:
    """Of the first rank; the file is an array that is never closed, one event a line."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line.rstrip().rstrip(","))
            except ValueError:
                continue
            if isinstance(event, dict) and event.get("ph") in ("X", "C"):
                yield event


_ENTRY = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ ([A-Z]+) (.*)")


def _log_entries(path: Path) -> Sequence[LogEntry]:
    """Messages of more than one line are put together again."""
    entries: list[LogEntry] = []
    if not path.is_file():
        return entries
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if match := _ENTRY.match(line):
                time = datetime.fromisoformat(match[1])
                entries.append(LogEntry(time, match[2], match[3]))
            elif entries:
                last = entries.pop()
                message = f"{last.message}\n{line.rstrip()}"
                entries.append(LogEntry(last.time, last.level, message))
    return entries


def _is_held(path: Path) -> bool:
    """Whether a process on this machine holds the lock of the run."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
