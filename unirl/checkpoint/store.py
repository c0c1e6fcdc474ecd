"""Checkpoint folders that are complete or not there: what is inside them is the caller's business.

`CheckpointStore.save` goes from a function that writes files to `<directory>/checkpoint-<step>`
with a manifest. Imports no torch.

A save writes into a hidden sibling folder, forces it to disk and renames it, so a killed process
leaves the earlier checkpoints as they were. Hidden names:

    .writing-checkpoint-<step>   unfinished; nobody reads it, the next save removes it
    .replaced-checkpoint-<step>  complete; the earlier one of a step that is being saved again
    .deleting-checkpoint-<step>  no longer kept; the next save removes what is left of it
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from unirl.checkpoint.finding import REPLACED, newest_first
from unirl.checkpoint.manifest import files_of, fsync, seal
from unirl.core.errors import CheckpointError

BEST = "best"
"""A link to the best checkpoint beside the checkpoints."""
_WRITING, _DELETING = ".writing-", ".deleting-"


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
            seal(writing, step)
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
        for later, folder in newest_first(self._directory):
            if later > step:
                aside = _free_name(folder.with_name(f"{folder.name}.before-resume-{step}"))
                moved.append(folder.rename(aside))
        return moved

    def steps(self) -> list[int]:
        """Of the checkpoints that are there, newest first."""
        return [step for step, _ in newest_first(self._directory)]

    def folder(self, step: int) -> Path:
        """Of a step that is there."""
        return dict(newest_first(self._directory))[step]

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
            intact = [folder for _, folder in newest_first(self._directory)]
        except OSError:
            intact = []
        written = sum(path.stat().st_size for path in files_of(writing))
        lines = [
            f"checkpoint-{step} could not be written to {self._directory}: {error}.",
            f"{_megabytes(written)} were written before that; {_free_space(self._directory)}.",
        ]
        if intact:
            newest = sum(path.stat().st_size for path in files_of(intact[0]))
            lines += [
                f"A checkpoint needs about {_megabytes(newest)}, judging by {intact[0].name}.",
                f"Still intact: {', '.join(folder.name for folder in intact)}.",
            ]
        else:
            lines.append("No earlier checkpoint can be read there.")
        lines.append("Free space or permit writing there, or set save_dir to another folder.")
        return "\n".join(lines)


def _free_name(path: Path) -> Path:
    """`path`, or `path-2`, `path-3`, ... where that exists."""
    names = (path if n == 1 else path.with_name(f"{path.name}-{n}") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


def _clean(directory: Path) -> None:
    """Removes what a killed process left, without losing a complete checkpoint."""
    for unfinished in (_WRITING, _DELETING):
        for folder in directory.glob(f"{unfinished}checkpoint-*"):
            shutil.rmtree(folder)
    for folder in directory.glob(f"{REPLACED}checkpoint-*"):
        successor = directory / folder.name.removeprefix(REPLACED)
        if successor.exists():
            shutil.rmtree(folder)
        else:
            folder.rename(successor)


def _publish(writing: Path, final: Path) -> None:
    """Gives the complete folder its name; a folder that has the name already steps aside first."""
    replaced = final.with_name(f"{REPLACED}{final.name}")
    if final.exists():
        final.rename(replaced)
    try:
        writing.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    fsync(final.parent)
    # The new one is complete: a leftover that cannot be removed now is removed by the next save.
    shutil.rmtree(replaced, ignore_errors=True)


def is_storage_failure(error: Exception) -> bool:
    """Whether the disk is to blame. torch.save and safetensors report a full disk as exceptions of
    their own, recognisable by their text only."""
    writers = ("inline_container", "PytorchStreamWriter", "iostream error", "os error")
    return isinstance(error, OSError) or any(writer in str(error) for writer in writers)


def _free_space(directory: Path) -> str:
    """How much the disk has left; a folder that could not be made is on its parent's disk."""
    existing = next(
        path for path in [directory, *directory.absolute().parents] if os.path.exists(path)
    )
    return f"{_megabytes(shutil.disk_usage(existing).free)} are free"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
