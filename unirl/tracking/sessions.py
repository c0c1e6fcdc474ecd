"""When a run was taken up and how that ended: `sessions.jsonl` in the run directory.

    {"began": "2026-11-30T20:14:03", "rollout": 0}
    {"ended": "2026-11-30T20:18:40", "rollout": 61, "state": "interrupted", "reason": "Ctrl-C"}

Two lines for each time. A process that is killed leaves the first one only.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from unirl.core.errors import UnirlError
from unirl.tracking.files import output_errors

logger = logging.getLogger("unirl.tracking")

State = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True)
class Ending:
    at: datetime
    rollouts_done: int | None
    """None where the run failed."""
    state: State
    reason: str
    """Of what was interrupted or failed; else empty."""


@dataclass(frozen=True)
class Session:
    """One process of a run, on whichever machine."""

    began: datetime
    """Local time of that machine, as in run.log."""
    rollout: int
    """The rollout that it began with."""
    ending: Ending | None
    """None while it goes on, and for ever where it was killed."""


class SessionLog:
    """Writes the lines of this process."""

    def __init__(self, run_dir: Path) -> None:
        self._path = sessions_file(run_dir)
        self._is_open = False

    def begin(self, rollout: int) -> None:
        self._write({"began": _now(), "rollout": rollout})
        self._is_open = True

    def end(self, rollouts_done: int | None, state: State, reason: str) -> None:
        """Nothing where no session was begun. A disk that refuses is a warning: the run is over."""
        if not self._is_open:
            return
        self._is_open = False
        fields = {"rollout": rollouts_done, "state": state, "reason": reason}
        try:
            self._write({"ended": _now(), **fields})
        except UnirlError as error:
            logger.warning("how the run ended is not noted: %s", error)

    def _write(self, fields: dict[str, Any]) -> None:
        with output_errors(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")


def has_finished(run_dir: Path) -> bool:
    """Whether its last process came to the end of the run, and said so."""
    file = sessions_file(run_dir)
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    with suppress(ValueError, AttributeError):  # a kill may cut a line
        return bool(lines) and json.loads(lines[-1]).get("state") == "finished"
    return False


def sessions_file(run_dir: Path) -> Path:
    return run_dir / "sessions.jsonl"


def paired(lines: Iterator[dict[str, Any]]) -> Iterator[Session]:
    """The sessions that the file's lines tell of, in order.

    Raises KeyError, TypeError or ValueError for lines of something else.
    """
    session: Session | None = None
    for line in lines:
        if "began" in line:
            if session is not None:
                yield session
            session = Session(datetime.fromisoformat(line["began"]), int(line["rollout"]), None)
        elif session is not None:
            at = datetime.fromisoformat(line["ended"])
            ending = Ending(at, line["rollout"], line["state"], str(line["reason"]))
            yield Session(session.began, session.rollout, ending)
            session = None
    if session is not None:
        yield session


def _now() -> str:
    return datetime.now().isoformat(timespec="seconds")
