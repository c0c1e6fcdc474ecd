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
    changes_file,
    evaluation_file,
    evaluation_steps,
)
from unirl.tracking.sessions import Session, paired, sessions_file
from unirl.tracking.tracker import Row

Json = dict[str, Any]

_OF_A_RUN = {"run_name": str, "model": dict, "num_rollouts": int}
"""What every config.yaml that a run writes has, and of which kind."""
_EXPECTED = "Give a run directory, <output_dir>/<run_name>, as `unirl train` writes it."


@dataclass(frozen=True)
class Evaluation:
    """The samples of the main suite after so many rollouts."""

    step: int
    samples: tuple[EvaluatedSample, ...]


@dataclass(frozen=True)
class EvaluationChange:
    """Evaluations from here on cannot be compared with earlier ones."""

    rollout: int
    changes: tuple[str, ...]
    """`key: old -> new` each."""

    @property
    def sentence(self) -> str:
        return f"From rollout {self.rollout} on it was evaluated otherwise: " + (
            f"{'; '.join(self.changes)}.".replace(" -> ", " → ")
        )


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
    """As config.yaml has it; at least run_name, model and num_rollouts."""
    rows: tuple[Row, ...]
    evaluations: tuple[Evaluation, ...]
    """The first and the last one that can be compared and whose samples were written down; one
    where there is one."""
    evaluation_changes: tuple[EvaluationChange, ...]
    """In order of their rollouts."""
    findings: tuple[Finding, ...] | None
    """None where nobody looked."""
    moves: tuple[Json, ...]
    """Lines of transitions.jsonl."""
    events: tuple[Json, ...]
    """Slices and counters of trace.json."""
    log: tuple[LogEntry, ...]
    sessions: tuple[Session, ...]
    is_held: bool
    """Whether a process has the directory now."""
    notes: tuple[str, ...]
    """What could not be read."""

    @property
    def name(self) -> str:
        return str(self.config["run_name"])

    @property
    def has_held_out_prompts(self) -> bool:
        """Whether evaluations have prompts of their own (data.eval)."""
        return (self.config.get("data") or {}).get("eval") is not None

    def of_kind(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row.kind == kind]

    def comparable_evaluations(self, metric: str) -> list[Row]:
        """Those with this metric that differ from the last one by the weights alone."""
        since = self.evaluation_changes[-1].rollout if self.evaluation_changes else 0
        rows = self.of_kind("eval")
        return [row for row in rows if row.rollout >= since and metric in row.metrics]

    @property
    def evaluated_texts(self) -> tuple[str, ...]:
        """The prompts of its last evaluation; empty where none was written down."""
        samples = self.evaluations[-1].samples if self.evaluations else ()
        return tuple({sample.prompt: sample.text for sample in samples}.values())

    @property
    def why_no_evaluation(self) -> str:
        """A sentence for where there is none to speak of."""
        if self.config.get("eval_interval") == 0:
            return "The run was never evaluated (eval_interval=0)."
        if self.evaluation_changes and self.of_kind("eval"):
            since = self.evaluation_changes[-1].rollout
            return f"There is no evaluation since rollout {since}, where its settings changed."
        return "There is no evaluation yet."


def read_run(path: Path) -> RunFiles:
    """Read a run directory, whatever state it is in.

    Raises:
        UnirlError: it is no folder, has no config.yaml of a run, or is what `unirl evaluate` left.
    """
    path = path.expanduser()
    if not path.is_dir():
        raise UnirlError(f"{path} is no folder. {_EXPECTED}")
    notes: list[str] = []
    rows = tuple(_rows(path / "metrics.jsonl", notes))
    if _is_of_evaluate(path, rows):
        raise UnirlError(
            f"{path} is no run: `unirl evaluate` left its evaluations there, and nothing was "
            f"trained. {_EXPECTED}"
        )
    return RunFiles(
        path=path.resolve(),
        config=_config(path),
        rows=rows,
        evaluations=tuple(_evaluations(path, notes)),
        evaluation_changes=tuple(_evaluation_changes(path, notes)),
        findings=_findings(path / "doctor.json", notes),
        moves=tuple(_moves(path / "transitions.jsonl", notes)),
        events=tuple(_events(path / "trace.json")),
        log=tuple(_log_entries(path / "run.log")),
        sessions=tuple(_sessions(path, notes)),
        is_held=_is_held(path / ".lock"),
        notes=tuple(notes),
    )


def _is_of_evaluate(path: Path, rows: Sequence[Row]) -> bool:
    """Whether evaluations are all there is; a run has a log from its first moment on."""
    return (
        (path / "evaluations").is_dir()
        and not (path / "run.log").exists()
        and not any(row.kind == "rollout" for row in rows)
    )


def _runs_below(path: Path) -> str:
    runs = sorted(child.parent.name for child in path.glob("*/config.yaml"))
    if not runs:
        return ""
    return f" There are runs below it: {', '.join(runs[:5])}{', ...' if len(runs) > 5 else ''}."


def _config(run: Path) -> Json:
    """The run's settings, if these are a run's.

    Raises:
        UnirlError: config.yaml is missing, cannot be read or lacks what every run has.
    """
    try:
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UnirlError(
            f"{run} is no run: it has no config.yaml.{_runs_below(run)} {_EXPECTED}"
        ) from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UnirlError(
            f"{run}/config.yaml cannot be read ({type(error).__name__}). {_EXPECTED}"
        ) from error
    fields = config if isinstance(config, dict) else {}
    lacking = [name for name, kind in _OF_A_RUN.items() if not isinstance(fields.get(name), kind)]
    if lacking:
        raise UnirlError(
            f"{run} is no run: its config.yaml has no {' and no '.join(lacking)}. {_EXPECTED}"
        )
    return fields


def _lines(path: Path, notes: list[str]) -> Iterator[Json]:
    """The objects of a file of JSON lines; what is none is counted in a note."""
    if not path.is_file():
        return
    bad: list[str] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                fields = json.loads(line)
            except ValueError:
                bad.append(line)
                continue
            if isinstance(fields, dict):
                yield fields
            else:
                bad.append(line)
    if bad and not bad[-1].endswith("\n"):
        bad.pop()
        notes.append(
            f"The last line of {path.name} is cut off, as a kill or a run that is still writing "
            "leaves it; it is left out."
        )
    if bad:
        notes.append(f"{plural(len(bad), 'line')} of {path.name} cannot be read; left out.")


def _rows(path: Path, notes: list[str]) -> Iterator[Row]:
    if not path.is_file():
        notes.append("metrics.jsonl is missing: nothing was measured yet.")
        return
    strange = 0
    for fields in _lines(path, notes):
        try:
            yield _row(fields)
        except (KeyError, TypeError, ValueError):
            strange += 1
    if strange:
        notes.append(
            f"{plural(strange, 'line')} of {path.name} hold no metrics of a run; left out."
        )


def _row(fields: Json) -> Row:
    """Raises KeyError, TypeError or ValueError for what is none."""
    kind, rollout, step = (fields.pop(name) for name in ("kind", "rollout", "optimizer_step"))
    if kind not in ("rollout", "eval"):
        raise ValueError(kind)
    numbers = {name: float(value) for name, value in fields.items()}
    return Row(kind, int(rollout), int(step), numbers)


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


def _evaluation_changes(run: Path, notes: list[str]) -> Iterator[EvaluationChange]:
    for line in _lines(changes_file(run), notes):
        yield EvaluationChange(line["rollout"], tuple(line["changes"]))


def _sessions(run: Path, notes: list[str]) -> Sequence[Session]:
    path = sessions_file(run)
    try:
        return list(paired(_lines(path, notes)))
    except (KeyError, TypeError, ValueError):
        notes.append(f"{path.name} cannot be read, so how the run ended is not known.")
        return []


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
