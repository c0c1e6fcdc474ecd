"""One checkpoint written by many ranks: complete on all of them, or not there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from unirl.checkpoint.store import CheckpointStore, is_storage_failure
from unirl.core.errors import CheckpointError, RankError
from unirl.distributed.ranks import Ranks

Write = Callable[[Path], None]


def save_together(store: CheckpointStore, step: int, write: Write, ranks: Ranks) -> Path:
    """`store.save` on rank 0, with `write(folder)` running on every rank before it is completed.

    Raises CheckpointError on all ranks when one of them cannot write; nothing is published then.
    """

    def save() -> Path | None:
        return _lead(store, step, write, ranks) if ranks.is_main else _follow(write, ranks)

    path = ranks.broadcast(ranks.together(save))
    assert path is not None
    return path


def _lead(store: CheckpointStore, step: int, write: Write, ranks: Ranks) -> Path:
    called = False

    def write_on_all(folder: Path) -> None:
        nonlocal called
        called = True
        ranks.broadcast(folder)
        ranks.together(lambda: write(folder))

    try:
        return store.save(step, write_on_all)
    finally:
        if not called:  # no folder: the others must not wait for one
            ranks.broadcast(None)


def _follow(write: Write, ranks: Ranks) -> None:
    folder: Path | None = ranks.broadcast(None)
    if folder is not None:
        with suppress(RankError):  # rank 0's own failure, which it will explain to all
            ranks.together(lambda: _write_here(write, folder))


def _write_here(write: Write, folder: Path) -> None:
    try:
        write(folder)
    except Exception as error:
        if not is_storage_failure(error):
            raise
        raise CheckpointError(
            f"this rank could not write its part into {folder}: {error}. Set save_dir to a folder "
            "that all ranks can write to."
        ) from error
