"""Writes a file of the run directory completely or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unirl.core.errors import UnirlError


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Turns a refusal of the disk into an error that names the file and the key to set."""
    try:
        yield
    except OSError as error:
        raise UnirlError(
            f"{path} cannot be written: {error.strerror or error}. "
            "Free space or permit writing there, or set output_dir to another folder."
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it takes the place of `path` when the block succeeds.

    It has the same suffix, because writers choose the format by it.

    Raises:
        UnirlError: the disk refused.
    """
    temporary = path.with_name(f".writing-{path.name}")
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
