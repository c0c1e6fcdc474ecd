"""Writes a file of the run directory completely or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unirl.core.errors import UnirlError

_INSTEAD = "name another folder (output_dir, or --output of a command)"


@contextmanager
def output_errors(path: Path, instead: str = _INSTEAD) -> Iterator[None]:
    """Turns a refusal of the disk into an error that names the file and what to set instead."""
    try:
        yield
    except OSError as error:
        raise UnirlError(
            f"{path} cannot be written: {error.strerror or error}. "
            f"Free space or permit writing there, or {instead}."
        ) from error


@contextmanager
def replacing(path: Path, instead: str = _INSTEAD) -> Iterator[Path]:
    """A temporary path to write to; it takes the place of `path` when the block succeeds.

    It has the same suffix, because writers choose the format by it.

    Raises:
        UnirlError: the disk refused.
    """
    temporary = path.with_name(f".writing-{path.name}")
    with output_errors(path, instead):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
