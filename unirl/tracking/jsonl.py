"""Rows as lines of JSON: `metrics.jsonl`, read by people, scripts and `tracking.plots`.

    {"kind": "rollout", "rollout": 3, "optimizer_step": 4, "rollout/reward_mean": 0.5, ...}

Floats keep full precision. JSON has no NaN, so it and the infinities are the strings "nan", "inf"
and "-inf"; `float()` reads them back.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from unirl.tracking.files import output_errors, replacing
from unirl.tracking.tracker import Panel, Row, Sink

logger = logging.getLogger("unirl.tracking")


class JsonlSink(Sink):
    """Appends one line a row; each is handed to the system at once, so a kill loses none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with output_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")

    def log(self, row: Row) -> None:
        fields = {
            "kind": row.kind,
            "rollout": row.rollout,
            "optimizer_step": row.optimizer_step,
            **{name: _jsonable(float(value)) for name, value in row.metrics.items()},
        }
        with output_errors(self._path):
            self._file.write(json.dumps(fields) + "\n")
            self._file.flush()

    def show(self, panel: Panel) -> None:
        """Pictures lie in the run directory already."""

    def close(self) -> None:
        with output_errors(self._path):
            self._file.close()


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a `metrics.jsonl`, in order."""
    with path.open(encoding="utf-8") as file:
        yield from map(_row, file)


def read_sound_rows(path: Path) -> Iterator[Row]:
    """The same without lines that a kill cut short or somebody broke."""
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                yield _row(line)


def _row(line: str) -> Row:
    fields = json.loads(line)
    kind, rollout, step = (fields.pop(name) for name in ("kind", "rollout", "optimizer_step"))
    return Row(kind, rollout, step, {name: float(value) for name, value in fields.items()})


def rewind(path: Path, rollout: int, first_evaluation: int | None = None) -> int:
    """Take back what a run logged at or after `rollout`, before it resumes there.

    Works on any file of JSON lines with a "rollout" field. Of rows of evaluations those at or
    after `first_evaluation` are taken back, where it is given. The lines taken back, and a last
    line that a kill cut short, go to `<name>.before-resume-<rollout>` beside it.

    Returns:
        The number of lines moved.
    """
    if not path.exists():
        return 0
    with output_errors(path), path.open(encoding="utf-8", errors="surrogateescape") as file:
        lines = list(file)
    first = {} if first_evaluation is None else {"eval": first_evaluation}
    moved = [line for line in lines if not _is_before(line, rollout, first)]
    if not moved:
        return 0
    for number, line in enumerate(lines[:-1], start=1):
        if not _is_readable(line):
            logger.warning("%s: line %d cannot be read and is moved aside", path, number)
    aside = path.with_name(f"{path.name}.before-resume-{rollout}")
    # Save the moved lines first: a kill in between doubles them, it loses none.
    with output_errors(aside), aside.open("a", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(line if line.endswith("\n") else line + "\n" for line in moved)
        file.flush()
        os.fsync(file.fileno())
    with replacing(path) as temporary:
        kept = "".join(line for line in lines if _is_before(line, rollout, first))
        temporary.write_text(kept, encoding="utf-8", errors="surrogateescape")
    return len(moved)


def has_sound_lines(path: Path) -> bool:
    """Whether each line can be read and has a rollout."""
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        return all(line.endswith("\n") and _is_readable(line) for line in file)


def _is_readable(line: str) -> bool:
    try:
        return "rollout" in json.loads(line)
    except (ValueError, TypeError):
        return False


def _is_before(line: str, rollout: int, first: Mapping[str, int]) -> bool:
    """Whether a complete line belongs to an earlier rollout; `first` has those of some kinds."""
    try:
        row = json.loads(line)
        return line.endswith("\n") and row["rollout"] < first.get(row.get("kind"), rollout)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _jsonable(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
