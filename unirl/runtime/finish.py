"""What a run leaves at its end: how it ended, curves, the report and the last lines."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

from unirl.config.schema import RunConfig
from unirl.report.page import write_report
from unirl.runtime.interrupt import GracefulStop
from unirl.runtime.run_directory import RunDirectory
from unirl.tracking.console import RunConsole, summary
from unirl.tracking.evaluations import comparable_since
from unirl.tracking.intervals import Interval, changes_between
from unirl.tracking.jsonl import read_rows
from unirl.tracking.plots import save_costs, save_curves
from unirl.tracking.sessions import SessionLog, State, has_finished
from unirl.trainer.archive import EvaluationArchive
from unirl.trainer.diffusion import TrainResult

logger = logging.getLogger("unirl.runtime")


def finish(
    directory: RunDirectory,
    result: TrainResult,
    stop: GracefulStop,
    sessions: SessionLog,
    console: RunConsole,
) -> None:
    """Curves, the report, and the before -> after table as the last lines."""
    sessions.end(result.rollouts_done, *_ending(result, stop))
    rows = list(read_rows(directory.metrics_file))
    if rows:
        save_curves(directory.metrics_file, directory.path / "curves.png")
        save_costs(directory.metrics_file, directory.path / "costs.png")
    if result.ended_by is not None and result.interrupted:
        logger.warning("stop_on=[%s] ended the run; with stop_on=[] it goes on", result.ended_by)
    elif result.ended_by is not None:
        logger.warning("stop_on=[%s] was met by the last evaluation", result.ended_by)
    if result.interrupted:
        logger.info("stopped after %d rollouts; %s", result.rollouts_done, _hint(directory, result))
    _write_report(directory.path)
    since = comparable_since(directory.path)
    evaluations = [row for row in rows if row.kind == "eval" and row.rollout >= since]
    changes: Mapping[str, Interval] = {}
    if len(evaluations) > 1:
        first, last = evaluations[0].rollout, evaluations[-1].rollout
        changes = changes_between(directory.path, first, last)
    width = console.width if console.is_terminal else math.inf
    summary(evaluations, changes, directory.path, result.rollouts_done, width)


def finish_complete(
    config: RunConfig,
    directory: RunDirectory,
    rollouts_done: int,
    stop: GracefulStop,
    console: RunConsole,
) -> TrainResult:
    """Of a run that has nothing left to train; writes what a kill at its very end left out."""
    logger.info("%s is complete: %d rollouts are done", directory.path, rollouts_done)
    archive = EvaluationArchive(directory.path, config)
    is_hacked = "hacking" in config.stop_on and any(
        moved.is_alarm for moved in archive.divergences(rollouts_done)
    )
    ended_by = "hacking" if is_hacked else None
    result = TrainResult(rollouts_done, config.num_rollouts, interrupted=False, ended_by=ended_by)
    # Without rows only the checkpoints are left, in a save_dir of their own.
    if directory.metrics_file.exists() and not has_finished(directory.path):
        sessions = SessionLog(directory.path)
        sessions.begin(rollouts_done)
        finish(directory, result, stop, sessions, console)
    return result


def note_failure(sessions: SessionLog, error: BaseException) -> None:
    """Of a run that ends with this error."""
    if isinstance(error, KeyboardInterrupt):
        sessions.end(None, "interrupted", "a second signal")
    else:
        sessions.end(None, "failed", f"{type(error).__name__}: {error}")


def _hint(directory: RunDirectory, result: TrainResult) -> str:
    """How an interrupted run can be taken up again."""
    if any(directory.checkpoint_dir.glob("checkpoint-*")):
        return f"go on with load_dir={directory.path}"
    return "nothing to save yet"


def _ending(result: TrainResult, stop: GracefulStop) -> tuple[State, str]:
    state: State = "interrupted" if result.interrupted else "finished"
    if result.ended_by is not None:
        return state, f"stop_on=[{result.ended_by}]"
    return state, stop.reason if result.interrupted else ""


def _write_report(directory: Path) -> None:
    """A page to look at and to send; what is wrong with it is no failure of the run."""
    try:
        logger.info("the run as a page: %s", write_report([directory]))
    except Exception as error:  # the training is done and saved, whatever this is
        logger.warning("no report was written: %s: %s", type(error).__name__, error)
