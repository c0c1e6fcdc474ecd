"""Which checkpoint is meant by a path, and which one is the newest that is sound.

Imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from unirl.checkpoint.manifest import MANIFEST, verify
from unirl.core.errors import CheckpointError

REPLACED = ".replaced-"
"""Prefix of a complete checkpoint of a step that is being saved again."""
_MAX_NAMES = 12
"""Of checkpoints or runs in a message."""
_FOLDER_NAME = re.compile(rf"({re.escape(REPLACED)})?checkpoint-(\d+)")


def newest_first(directory: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints in a folder, highest step first.

    A replaced one counts where its successor is missing: the process died between two renames.
    """
    folders: dict[int, Path] = {}
    for folder in sorted(directory.iterdir()) if directory.is_dir() else []:
        match = _FOLDER_NAME.fullmatch(folder.name)
        # ".replaced-" sorts before "checkpoint-", so a successor overwrites it.
        if match and folder.is_dir():
            folders[int(match[2])] = folder
    return sorted(folders.items(), reverse=True)


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of this name is taken for a checkpoint."""
    return _FOLDER_NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class NewestSound:
    """The checkpoint to take of a folder of checkpoints."""

    folder: Path | None
    """None where there are none at all."""
    skipped: tuple[str, ...]
    """Why newer ones were passed over, a sentence each."""


def newest_sound(directory: Path) -> NewestSound:
    """The newest checkpoint of a folder that is complete and undamaged.

    Raises CheckpointError when there are checkpoints and all of them are damaged.
    """
    skipped = []
    for _, folder in newest_first(directory):
        try:
            verify(folder)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        return NewestSound(folder, tuple(skipped))
    if skipped:
        reasons = "\n".join(skipped)
        raise CheckpointError(
            f"{directory}: no checkpoint is sound.\n{reasons}\n"
            "Restore one of them, or set run_name to another name to start afresh."
        )
    return NewestSound(None, ())


def find_checkpoint(path: Path, key: str | None = "load_dir") -> Path:
    """The checkpoint a user means by `path`, verified.

    Args:
        path: a checkpoint, a folder of checkpoints (the newest is taken), or a run directory.
        key: what the user set to it, for messages; None for a word of a command.

    Raises:
        CheckpointError: there is none, or the one meant is damaged; then the newest sound
            alternative is named, never taken silently.
    """
    try:
        return _find(path, key)
    except OSError as error:
        raise CheckpointError(
            f"{_asked(path, key)} cannot be read: {error.strerror}. "
            f"Correct {key or 'the path'} or permissions."
        ) from error


def _asked(path: Path, key: str | None) -> str:
    return f"{path}" if key is None else f"{key}={path}"


def _find(path: Path, key: str | None) -> Path:
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        raise CheckpointError(
            f"{_asked(path, key)}: expected a checkpoint, a folder of checkpoints or a run "
            f"directory, found {found}. {_what_is_there(path)}Correct {key or 'the path'}."
        )
    if _FOLDER_NAME.fullmatch(path.resolve().name) or (path / MANIFEST).exists():
        folder, neighbours = path, path.resolve().parent
    else:
        neighbours = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        candidates = newest_first(neighbours)
        if not candidates:
            remedy = (
                "Name another run, or let this one save some with save_interval."
                if key is None
                else f"Correct {key}, or set {key}=null to start afresh."
            )
            raise CheckpointError(
                f"{_asked(path, key)}: no checkpoint-<step> folder in {neighbours}. {remedy}"
            )
        folder = candidates[0][1]
    try:
        verify(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}\n{_alternative(folder, neighbours, key)}") from error
    return folder


def _what_is_there(path: Path) -> str:
    """A sentence on the nearest folder that exists: its checkpoints, or else its folders."""
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    nearest = missing.parent
    if path.exists() or not nearest.is_dir():
        return ""
    if nearest == Path():
        return f"There is no folder {missing} in {Path.cwd()}. "
    for folder in (nearest, nearest / "checkpoints"):
        steps = [name.name for _, name in reversed(newest_first(folder))]
        if steps:
            return f"{folder} has {_enumerated(steps)}. "
    folders = sorted(entry.name for entry in nearest.iterdir() if entry.is_dir())
    return f"{nearest} has {_enumerated(folders) or 'no folders'}. "


def _enumerated(names: list[str]) -> str:
    """The last ones where there are many."""
    left_out = len(names) - _MAX_NAMES
    return ", ".join([f"{left_out} others"] * (left_out > 0) + names[-_MAX_NAMES:])


def _alternative(damaged: Path, neighbours: Path, key: str | None) -> str:
    """A sentence on what to load instead."""
    for _, folder in newest_first(neighbours):
        if folder.resolve() == damaged.resolve():
            continue
        try:
            verify(folder)
        except CheckpointError:
            continue
        use = f"name {folder}" if key is None else f"set {key}={folder}"
        return f"The newest sound checkpoint is {folder}: {use} to use it."
    return f"No other sound checkpoint is in {neighbours}."
