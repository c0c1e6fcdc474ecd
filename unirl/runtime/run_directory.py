"""The run directory: one run, one process, nothing overwritten."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from unirl.checkpoint.source import Source, checkpoint_directory, find_source, run_directory
from unirl.checkpoint.store import CheckpointStore
from unirl.config.schema import AUTO, RunConfig
from unirl.core.errors import ConfigError
from unirl.core.types import MAIN_SUITE
from unirl.tracking.evaluations import (
    changes_file,
    comparable_since,
    evaluation_steps,
    note_changes,
    set_aside_damaged,
    set_aside_evaluations,
)
from unirl.tracking.files import replacing
from unirl.tracking.intervals import metric_prefix
from unirl.tracking.jsonl import has_sound_lines, read_sound_rows, rewind
from unirl.tracking.tracker import Row

logger = logging.getLogger("unirl.runtime")


class RunDirectory:
    """Claims `<output_dir>/<run_name>` for this process.

    A directory that holds a run already is taken only to resume that run; then rows at or beyond
    the checkpoint are moved aside and written again.
    """

    def __init__(self, config: RunConfig) -> None:
        self.path = run_directory(config)
        self._config = config
        self._lock: int | None = None

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def transitions_file(self) -> Path:
        return self.path / "transitions.jsonl"

    @property
    def trace_file(self) -> Path:
        return self.path / "trace.json"

    @property
    def checkpoint_dir(self) -> Path:
        return checkpoint_directory(self._config)

    def records(self) -> list[Path]:
        """What the run has written down up to now."""
        evaluations = sorted((self.path / "evaluations").glob("*.jsonl"))
        files = [self.metrics_file, self.transitions_file, *evaluations]
        return [file for file in files if file.exists()]

    def __enter__(self) -> Self:
        """Create and lock the directory.

        Raises ConfigError when another process runs in it or when it holds another run.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR)
            self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.checkpoint_dir):
                pass
        except OSError as error:
            self._release()
            raise ConfigError(
                f"{error.filename or self.path} cannot be written: {error.strerror}. "
                "Set output_dir (or save_dir) to a folder you can write to."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._release()
            raise ConfigError(
                f"another process is running in {self.path}. Set run_name to another name."
            ) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._release()

    def source(self) -> Source:
        """The verified checkpoint that load_dir means.

        Raises ConfigError when the directory, or save_dir, holds a run that is not being resumed.
        """
        source = find_source(self._config)
        resumes_here = self._config.load_dir == AUTO or (
            source.folder is not None
            and source.folder.resolve().parent == self.checkpoint_dir.resolve()
        )
        has_checkpoints = any(self.checkpoint_dir.glob("checkpoint-*"))
        has_rows = self.metrics_file.exists() and self.metrics_file.stat().st_size > 0
        if has_rows and not resumes_here:
            resume = f"to go on with it, set load_dir={self.path}; " if has_checkpoints else ""
            raise ConfigError(
                f"{self.path} holds a run already: {resume}"
                "for a new run set run_name to another name, or delete the directory."
            )
        if has_checkpoints and not resumes_here:
            raise ConfigError(
                f"{self.checkpoint_dir} holds checkpoints of another run. Set save_dir to a folder "
                f"of this run's own, or resume that run with load_dir={self.checkpoint_dir}."
            )
        return source

    def begin(self, rollout: int, evaluation_changes: Sequence[str] = ()) -> None:
        """Write the resolved config; set aside what lies beyond the rollout to go on with.

        evaluation_changes: why later evaluations cannot be compared with earlier ones.
        """
        changes = changes_file(self.path)
        if changes.exists() and not has_sound_lines(changes):
            evaluation_changes = (*evaluation_changes, f"{changes} is damaged")
        stands = self._evaluation_stands(rollout, evaluation_changes)
        first_evaluation = rollout + 1 if stands else rollout
        num_taken_back = rewind(self.metrics_file, rollout, first_evaluation)
        rewind(self.transitions_file, rollout)
        rewind(changes, rollout)
        if num_taken_back:
            logger.info(
                "what the run had logged beyond rollout %d, %d rows, is in %s.before-resume-%d",
                rollout,
                num_taken_back,
                self.metrics_file.name,
                rollout,
            )
        self._tell_gaps(rollout)
        for path in set_aside_evaluations(self.path, rollout, first_evaluation):
            logger.debug("resuming at rollout %d: set aside %s", rollout, path)
        for reason in set_aside_damaged(self.path, rollout, self._num_rewarded()):
            logger.warning("%s It is moved aside.", reason)
        self._note_evaluation_changes(rollout, evaluation_changes)
        # Of what the run was before; the next one is written at the end.
        (self.path / "report.html").unlink(missing_ok=True)
        for path in CheckpointStore(self.checkpoint_dir).set_aside_after(rollout):
            logger.warning("resuming at rollout %d: set aside %s", rollout, path)
        write_config(self._config, self.config_file)

    def _evaluation_stands(self, rollout: int, changes: Sequence[str]) -> bool:
        """Whether what was evaluated at the very rollout to go on with stays: made with these
        weights as it would be made now, and not made again, as after another eval_interval."""
        rows = _rows(self.metrics_file)
        logged = any(row.kind == "eval" and row.rollout == rollout for row in rows)
        return logged and not changes and not self._config.evaluation_is_due(rollout)

    def _num_rewarded(self) -> dict[int, float]:
        """Samples of each evaluation's main suite that had a reward."""
        name = f"{metric_prefix(MAIN_SUITE)}/num_samples"
        rows = (row for row in _rows(self.metrics_file) if row.kind == "eval")
        return {row.rollout: row.metrics[name] for row in rows if name in row.metrics}

    def _tell_gaps(self, rollout: int) -> None:
        """A file of rows that was cut, or edited, is no record of the run any more."""
        size = self._config.accumulate_rollouts
        logged = [row.rollout for row in _rows(self.metrics_file) if row.kind == "rollout"]
        if not logged:
            return
        due = list(range(logged[0], rollout, size))
        if logged != due:
            repeated = [one for one, count in Counter(logged).items() if count > 1]
            odd = sorted({*due}.symmetric_difference(logged) | {*repeated}) or logged
            logger.warning(
                "%s does not have one row for every window before rollout %d; look at rollouts %s",
                self.metrics_file,
                rollout,
                ", ".join(map(str, odd[:10])),
            )

    def _note_evaluation_changes(self, rollout: int, changes: Sequence[str]) -> None:
        """And say which evaluations cannot be looked at any more."""
        logged = {row.rollout for row in _rows(self.metrics_file) if row.kind == "eval"}
        if changes and logged:
            note_changes(self.path, rollout, changes)
            logger.warning(
                "evaluations from rollout %d on are not compared with earlier ones: %s",
                rollout,
                "; ".join(changes),
            )
        since, kept = comparable_since(self.path), set(evaluation_steps(self.path))
        comparable = {step for step in logged if step >= since}
        if comparable - kept:
            logger.warning(
                "%s lacks the evaluations after %s rollouts: intervals, pictures and the alarm "
                "do not go back to them",
                self.path / "evaluations",
                ", ".join(map(str, sorted(comparable - kept)[:10])),
            )
        if kept - comparable:
            logger.warning(
                "%s lacks the rows of the evaluations after %s rollouts",
                self.metrics_file,
                ", ".join(map(str, sorted(kept - comparable)[:10])),
            )

    def is_complete(self, rollouts_done: int) -> bool:
        """Whether nothing is left to do after so many rollouts: neither one more nor an
        evaluation that was interrupted."""
        config = self._config
        if rollouts_done < config.num_rollouts:
            return False
        if not config.evaluation_is_due(rollouts_done):
            return True
        rows = _rows(self.metrics_file)
        evaluated = {row.rollout for row in rows if row.kind == "eval"}
        return not rows or rollouts_done in evaluated

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def write_config(config: RunConfig, file: Path) -> None:
    """Every key with its value, as YAML that a run can be started from."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    with replacing(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _rows(file: Path) -> list[Row]:
    """But lines that a kill cut or somebody broke."""
    return list(read_sound_rows(file)) if file.exists() else []
