"""Checkpoint folders that are complete or not there: what is inside them is the caller's business.

`CheckpointStore.save` goes from a function that writes files to `<directory>/checkpoint-<step>`
with a `manifest.json` of sizes and hashes; `find_checkpoint` goes from a path the user gave to a
verified folder. Imports no torch.

A save writes into a hidden sibling folder, forces it to disk and renames it, so a killed process
leaves the earlier checkpoints as they were. Hidden names:

    .writing-checkpoint-<step>   unfinished; nobody reads it, the next save removes it
    .replaced-checkpoint-<step>  complete; the earlier one of a step that is being saved again
    .deleting-checkpoint-<step>  no longer kept; the next save removes what is left of it
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unirl.core.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
BEST = "best"
"""A link to the best checkpoint beside the checkpoints."""
_WRITING, _REPLACED, _DELETING = ".writing-", ".replaced-", ".deleting-"
_MAX_NAMES = 12
"""Of checkpoints or runs in a message."""
_FOLDER_NAME = re.compile(r"(\.replaced-)?checkpoint-(\d+)")


@dataclass(frozen=True)
class FileEntry:
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint holds."""

    step: int
    files: Mapping[str, FileEntry]
    """Path relative to the checkpoint folder -> size and hash; without the manifest itself."""


class CheckpointStore:
    """Writes checkpoints into one folder; one process writes at a time.

    store = CheckpointStore(run_dir / "checkpoints")
    store.save(10, lambda folder: save_file(tensors, folder / "policy.safetensors"))
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """The folder `checkpoint-<step>`, on disk and complete.

        An earlier checkpoint of the same step stays until the new one is complete.

        Args:
            write: puts its files into the (empty) folder it is given.

        Raises:
            CheckpointError: the disk refused; checkpoints already written are untouched.
        """
        final = self._directory / f"checkpoint-{step}"
        writing = self._directory / f"{_WRITING}{final.name}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            _clean(self._directory)
            writing.mkdir()
            write(writing)
            _seal(writing, step)
            _publish(writing, final)
        except Exception as error:
            if not is_storage_failure(error):
                raise
            raise CheckpointError(self._explain(error, step, writing)) from error
        finally:
            # Gone after a success. Left by any failure, Ctrl-C included.
            shutil.rmtree(writing, ignore_errors=True)
        return final

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename checkpoints of later steps, which a run resumed at `step` will write anew.

        Otherwise the newest folder could be one of the abandoned course. Returns the new names.
        """
        moved = []
        for later, folder in _newest_first(self._directory):
            if later > step:
                aside = _free_name(folder.with_name(f"{folder.name}.before-resume-{step}"))
                moved.append(folder.rename(aside))
        return moved

    def steps(self) -> list[int]:
        """Of the checkpoints that are there, newest first."""
        return [step for step, _ in _newest_first(self._directory)]

    def folder(self, step: int) -> Path:
        """Of a step that is there."""
        return dict(_newest_first(self._directory))[step]

    def retain(self, num_newest: int, besides: int | None) -> list[int]:
        """Delete all but the newest checkpoints and that of the step `besides`; the steps deleted.

        A kill leaves each of them whole or gone. Raises OSError when the disk refuses.
        """
        old = [step for step in self.steps()[num_newest:] if step != besides]
        for step in old:
            deleting = self._directory / f"{_DELETING}checkpoint-{step}"
            shutil.rmtree(self.folder(step).rename(deleting))
        return old

    def mark_best(self, step: int | None) -> None:
        """Let the link `best` lead to the checkpoint of a step; None takes it away.

        Raises OSError where there can be no links.
        """
        link = self._directory / BEST
        if step is None:
            link.unlink(missing_ok=True)
            return
        fresh = self._directory / f".{BEST}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(self.folder(step).name)
        fresh.replace(link)

    def _explain(self, error: Exception, step: int, writing: Path) -> str:
        try:
            intact = [folder for _, folder in _newest_first(self._directory)]
        except OSError:
            intact = []
        written = sum(path.stat().st_size for path in _files(writing))
        lines = [
            f"checkpoint-{step} could not be written to {self._directory}: {error}.",
            f"{_megabytes(written)} were written before that; {_free_space(self._directory)}.",
        ]
        if intact:
            newest = sum(path.stat().st_size for path in _files(intact[0]))
            lines += [
                f"A checkpoint needs about {_megabytes(newest)}, judging by {intact[0].name}.",
                f"Still intact: {', '.join(folder.name for folder in intact)}.",
            ]
        else:
            lines.append("No earlier checkpoint can be read there.")
        lines.append("Free space or permit writing there, or set save_dir to another folder.")
        return "\n".join(lines)


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
    for _, folder in _newest_first(directory):
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


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of this name is taken for a checkpoint."""
    return _FOLDER_NAME.fullmatch(name) is not None


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
        candidates = _newest_first(neighbours)
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
        steps = [name.name for _, name in reversed(_newest_first(folder))]
        if steps:
            return f"{folder} has {_enumerated(steps)}. "
    folders = sorted(entry.name for entry in nearest.iterdir() if entry.is_dir())
    return f"{nearest} has {_enumerated(folders) or 'no folders'}. "


def _enumerated(names: list[str]) -> str:
    """The last ones where there are many."""
    left_out = len(names) - _MAX_NAMES
    return ", ".join([f"{left_out} others"] * (left_out > 0) + names[-_MAX_NAMES:])


def verify(folder: Path) -> Manifest:
    """The manifest of a checkpoint, after every file's size and hash was compared with it.

    Raises:
        CheckpointError: names the damaged file with what was expected and what was found.
    """
    try:
        manifest = _read_manifest(folder)
        for name, expected in manifest.files.items():
            _compare(folder / name, expected)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}.") from error
    return manifest


def _compare(path: Path, expected: FileEntry) -> None:
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing; the manifest lists it with {expected.num_bytes} bytes."
        )
    num_bytes = path.stat().st_size
    if num_bytes != expected.num_bytes:
        raise CheckpointError(
            f"{path} is damaged: expected {expected.num_bytes} bytes, found {num_bytes}."
        )
    sha256 = _sha256(path)
    if sha256 != expected.sha256:
        raise CheckpointError(
            f"{path} is damaged: expected sha256 {expected.sha256}, found {sha256}."
        )


def _alternative(damaged: Path, neighbours: Path, key: str | None) -> str:
    """A sentence on what to load instead."""
    for _, folder in _newest_first(neighbours):
        if folder.resolve() == damaged.resolve():
            continue
        try:
            verify(folder)
        except CheckpointError:
            continue
        use = f"name {folder}" if key is None else f"set {key}={folder}"
        return f"The newest sound checkpoint is {folder}: {use} to use it."
    return f"No other sound checkpoint is in {neighbours}."


def _newest_first(directory: Path) -> list[tuple[int, Path]]:
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


def _free_name(path: Path) -> Path:
    """`path`, or `path-2`, `path-3`, ... where that exists."""
    names = (path if n == 1 else path.with_name(f"{path.name}-{n}") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


def _clean(directory: Path) -> None:
    """Removes what a killed process left, without losing a complete checkpoint."""
    for unfinished in (_WRITING, _DELETING):
        for folder in directory.glob(f"{unfinished}checkpoint-*"):
            shutil.rmtree(folder)
    for folder in directory.glob(f"{_REPLACED}checkpoint-*"):
        successor = directory / folder.name.removeprefix(_REPLACED)
        if successor.exists():
            shutil.rmtree(folder)
        else:
            folder.rename(successor)


def _seal(folder: Path, step: int) -> None:
    """Adds the manifest and forces everything to disk."""
    entries = {}
    for path in _files(folder):
        _fsync(path)
        entry = FileEntry(path.stat().st_size, _sha256(path))
        entries[path.relative_to(folder).as_posix()] = asdict(entry)
    content = {"format_version": FORMAT_VERSION, "step": step, "files": entries}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
    _fsync(folder / MANIFEST)
    for subfolder in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _fsync(subfolder)


def _publish(writing: Path, final: Path) -> None:
    """Gives the complete folder its name; a folder that has the name already steps aside first."""
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():
        final.rename(replaced)
    try:
        writing.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    _fsync(final.parent)
    # The new one is complete: a leftover that cannot be removed now is removed by the next save.
    shutil.rmtree(replaced, ignore_errors=True)


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint was never completed.")
    try:
        content: Any = json.loads(path.read_bytes())
        version = content["format_version"]
        if version == FORMAT_VERSION:
            files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
            return Manifest(content["step"], files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged: not a checkpoint manifest ({error!r})."
        ) from error
    raise CheckpointError(
        f"{path} has format version {version}; this version of unirl reads {FORMAT_VERSION}."
    )


def is_storage_failure(error: Exception) -> bool:
    """Whether the disk is to blame. torch.save and safetensors report a full disk as exceptions of
    their own, recognisable by their text only."""
    writers = ("inline_container", "PytorchStreamWriter", "iostream error", "os error")
    return isinstance(error, OSError) or any(writer in str(error) for writer in writers)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    """Waits until a file's or folder's content is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_space(directory: Path) -> str:
    """How much the disk has left; a folder that could not be made is on its parent's disk."""
    existing = next(
        path for path in [directory, *directory.absolute().parents] if os.path.exists(path)
    )
    return f"{_megabytes(shutil.disk_usage(existing).free)} are free"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
