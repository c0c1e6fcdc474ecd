"""How a run went: how far it came, whether it ended by itself, when it was taken up again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from unirl.report.numbers import plural
from unirl.report.reading import RunFiles
from unirl.tracking.sessions import Ending


@dataclass(frozen=True)
class Outcome:
    state: str
    """finished, interrupted, failed, killed or going on."""
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
    resumed = tuple(one.rollout for one in run.sessions[1:] if one.rollout > 0)
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
        run.sessions[0].began if run.sessions else None,
        _last_moment(run),
    )


def _done(kind: str, rollout: int) -> int:
    return rollout + 1 if kind == "rollout" else rollout


def _state(run: RunFiles, done: int, total: int) -> tuple[str, str]:
    ending = run.sessions[-1].ending if run.sessions else None
    if ending is not None:  # even while it holds its folder, to write its own report
        return ending.state, _how(ending, done, total)
    if run.is_held:
        return "going on", f"The run is still going on; {plural(done, 'rollout')} are done so far."
    if done >= total:
        return "finished", f"All {plural(total, 'rollout')} are done."
    return (
        "killed",
        f"The last thing it wrote was after {plural(done, 'rollout')}, it noted no end, and no "
        "process holds it here: it was killed, or goes on on another machine.",
    )


def _how(ending: Ending, done: int, total: int) -> str:
    if ending.state == "failed":
        return f"Failed after {plural(done, 'rollout')}: {ending.reason.rstrip('.')}."
    if ending.state == "interrupted":
        after = done if ending.rollouts_done is None else ending.rollouts_done
        return f"Interrupted after {plural(after, 'rollout')} by {ending.reason}."
    met = f" {ending.reason} was met." if ending.reason else ""
    return f"All {plural(total, 'rollout')} are done.{met}"


def _last_moment(run: RunFiles) -> datetime | None:
    ending = run.sessions[-1].ending if run.sessions else None
    if ending is not None:
        return ending.at
    return run.log[-1].time if run.log else None


def _wall_seconds(run: RunFiles) -> float | None:
    """As the run counted it, or else the sum over sessions that noted their end."""
    if run.rows and "progress/wall_seconds" in run.rows[-1].metrics:
        return run.rows[-1].metrics["progress/wall_seconds"]
    spans = [one.ending.at - one.began for one in run.sessions if one.ending is not None]
    return sum(spans, timedelta()).total_seconds() if spans else None
