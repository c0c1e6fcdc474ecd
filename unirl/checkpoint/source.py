"""Which checkpoint a run goes on with: the one `load_dir` names, or with `auto` its own newest.

Imports no torch, so that `unirl check` can say it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from unirl.checkpoint.finding import find_checkpoint, newest_sound
from unirl.config.schema import AUTO, RunConfig
from unirl.core.errors import CheckpointError


@dataclass(frozen=True)
class Source:
    """Where a run begins."""

    folder: Path | None
    """A verified checkpoint; None starts afresh."""
    skipped: tuple[str, ...] = ()
    """auto: why newer checkpoints were passed over."""


def run_directory(config: RunConfig) -> Path:
    return Path(config.output_dir).expanduser() / config.run_name


def checkpoint_directory(config: RunConfig) -> Path:
    if config.save_dir is None:
        return run_directory(config) / "checkpoints"
    return Path(config.save_dir).expanduser()


def find_source(config: RunConfig) -> Source:
    """Raises CheckpointError when there is no sound checkpoint where one is asked for."""
    if config.load_dir is None:
        return Source(None)
    if config.load_dir != AUTO:
        return Source(find_checkpoint(Path(config.load_dir).expanduser()))
    directory = checkpoint_directory(config)
    found = newest_sound(directory)
    if found.folder is not None and config.save_dir is not None:
        _require_own(found.folder, config)
    return Source(found.folder, found.skipped)


def _require_own(folder: Path, config: RunConfig) -> None:
    """A folder of checkpoints that was named by hand may be another run's."""
    saved = json.loads((folder / "trainer_state.json").read_text())["config"]
    name = saved.get("run_name")
    if name != config.run_name:
        raise CheckpointError(
            f"load_dir=auto takes up this run's own checkpoints, but {folder} was saved by the run "
            f"{name!r}. Set save_dir to a folder of this run's own, or name it: load_dir={folder}."
        )
