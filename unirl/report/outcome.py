"""How a run went: how far it came, whether it ended by itself, when it was taken up again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from unirl.report.numbers import plural
from unirl.report.reading import LogEntry, RunFiles

_BEGINS = re.compile(r": training \S+ of \S+ M parameters of ")
_RESUMES = re.compile(r"^resumed from .* at rollout (\d+)")
_FAILS = re.compile(r"^the run failed")
_STOPS = re.compile(r"^stopped after (\d+) rollouts")


@dataclass(frozen=True)
class Outcome:
    state: str
    """finished, interrupted, failed, going on or ended early."""
    sentence: str
    done: int
    """Rollouts."""
    total: int
    resumed_at: tuple[int, ...]
    """The rollouts at which the run was taken up again."""
    wall_seconds: float | None
    began: datetime | None
    ended: datetime | None


def outcome_of(run: RunFiles) -> Outcome:
    done = max((_done(row.kind, row.rollout) for row in run.rows), default=0)
    total = run.config["num_rollouts"]
    resumed = tuple(int(m[1]) for entry in run.log if (m := _RESUMES.search(entry.message)))
    state, sentence = _state(run, done, total)
    if resumed:
        places = ", ".join(str(rollout) for rollout in resumed)
        sentence += f" Resumed {plural(len(resumed), 'time')}, at rollout {places}."
    return Outcome(
        state,
        sentence,
        done,
        total,
        resumed,
        _wall_seconds(run),
        run.log[0].time if run.log else None,
        run.log[-1].time if run.log else None,
    )


def _done(kind: str, rollout: int) -> int:
    return rollout + 1 if kind == "rollout" else rollout


def _state(run: RunFiles, done: int, total: int) -> tuple[str, str]:
    stops = [m for entry in _last_session(run.log) if (m := _STOPS.search(entry.message))]
    if stops:
        return "interrupted", f"Interrupted after {plural(int(stops[-1][1]), 'rollout')}."
    if any(_FAILS.search(entry.message) for entry in _last_session(run.log)):
        return "failed", f"The run failed after {plural(done, 'rollout')}; see its warnings below."
    if done >= total:
        return "finished", f"All {plural(total, 'rollout')} are done."
    if run.is_held:
        return "going on", f"The run is still going on; {plural(done, 'rollout')} are done so far."
    return (
        "ended early",
        f"The last thing it wrote was after {plural(done, 'rollout')}, and no process holds it "
        "here: it was killed, failed, or goes on on another machine.",
    )


def _wall_seconds(run: RunFiles) -> float | None:
    """As the run counted it, or else the time between first and last line of each session."""
    if run.rows and "progress/wall_seconds" in run.rows[-1].metrics:
        return run.rows[-1].metrics["progress/wall_seconds"]
    if not run.log:
        return None
    sessions = _sessions(run.log)
    return sum((s[-1].time - s[0].time for s in sessions), timedelta()).total_seconds()


def _last_session(log: tuple[LogEntry, ...]) -> list[LogEntry]:
    return _sessions(log)[-1]


def _sessions(log: tuple[LogEntry, ...]) -> list[list[LogEntry]]:
    """The log cut where a process began; at least one, which may be empty."""
    sessions: list[list[LogEntry]] = [[]]
    for entry in log:
        if _BEGINS.search(entry.message) and sessions[-1]:
            sessions.append([])
        sessions[-1].append(entry)
    return sessions
