"""Digests that tell whether files are still those a run began with. Imports no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SAMPLE_BYTES = 1 << 20


def ends_digest(file: Path) -> str:
    """Of a file's size, beginning and end: a gigabyte costs as much as a megabyte."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        digest.update(opened.read(_SAMPLE_BYTES))
        opened.seek(max(size - _SAMPLE_BYTES, 0))
        digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def path_digest(path: Path) -> str:
    """Of a file, or of all files of a folder by name but hidden ones; the same for a copy
    elsewhere. Empty where there is nothing."""
    if path.is_file():
        return ends_digest(path)
    digest = hashlib.sha256()
    names = {file.relative_to(path): file for file in path.rglob("*") if file.is_file()}
    kept = sorted(n for n in names if not any(part.startswith(".") for part in n.parts))
    for name in kept:
        digest.update(f"{name.as_posix()} {ends_digest(names[name])}\n".encode())
    return digest.hexdigest() if kept else ""
