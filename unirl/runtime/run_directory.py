"""The run directory: one run, one process, nothing overwritten."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from unirl.checkpoint.store import find_checkpoint
from unirl.config.schema import RunConfig
from unirl.core.errors import ConfigError
from unirl.tracking.files import replacing
from unirl.tracking.jsonl import rewind


class RunDirectory:
    """Claims `<output_dir>/<run_name>` for this process.

    A directory that holds a run already is taken only to resume that run; then rows at or beyond
    the checkpoint are moved aside and written again.
    """

    def __init__(self, config: RunConfig) -> None:
        self.path = Path(config.output_dir).expanduser() / config.run_name
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
    def image_dir(self) -> Path:
        return self.path / "images"

    @property
    def checkpoint_dir(self) -> Path:
        save_dir = self._config.save_dir
        return self.path / "checkpoints" if save_dir is None else Path(save_dir).expanduser()

    def __enter__(self) -> Self:
        """Create and lock the directory.

        Raises ConfigError when another process runs in it or when it holds another run.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR)
        except OSError as error:
            raise ConfigError(
                f"the run directory {self.path} cannot be created: {error}. "
                "Set output_dir to a folder you can write to."
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

    def checkpoint_to_resume(self) -> Path | None:
        """The verified checkpoint that load_dir means.

        Raises ConfigError when the directory holds a run that is not being resumed.
        """
        source = None
        if self._config.load_dir is not None:
            source = find_checkpoint(Path(self._config.load_dir).expanduser())
        if self.config_file.exists() and not self._is_own_checkpoint(source):
            raise ConfigError(
                f"{self.path} holds a run already. To go on with it, set load_dir={self.path}; "
                "for a new run set run_name to another name, or delete the directory."
            )
        return source

    def _is_own_checkpoint(self, source: Path | None) -> bool:
        return source is not None and source.resolve().parent == self.checkpoint_dir.resolve()

    def begin(self, rollout: int) -> None:
        """Write the resolved config; take back rows at or beyond the rollout to go on with."""
        rewind(self.metrics_file, rollout)
        rewind(self.transitions_file, rollout)
        text = yaml.safe_dump(self._config.model_dump(mode="json"), sort_keys=False)
        with replacing(self.config_file) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
