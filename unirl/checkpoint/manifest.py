"""What a complete checkpoint holds: `manifest.json` has the size and the hash of every file.

Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unirl.core.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


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


def seal(folder: Path, step: int) -> None:
    """Adds the manifest and forces everything to disk."""
    entries = {}
    for path in files_of(folder):
        fsync(path)
        entry = FileEntry(path.stat().st_size, _sha256(path))
        entries[path.relative_to(folder).as_posix()] = asdict(entry)
    content = {"format_version": FORMAT_VERSION, "step": step, "files": entries}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
    fsync(folder / MANIFEST)
    for subfolder in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        fsync(subfolder)


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


def files_of(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Waits until a file's or folder's content is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
