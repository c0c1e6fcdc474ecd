"""Paths that may point into the installed package."""

from __future__ import annotations

from pathlib import Path

import unirl

ASSETS = Path(unirl.__file__).parent / "assets"


def resolve_path(text: str) -> Path:
    """`pkg:numbers/train.jsonl` ships with unirl; anything else is a path as it is."""
    return (
        ASSETS / text.removeprefix("pkg:") if text.startswith("pkg:") else Path(text).expanduser()
    )


def weights_file(text: str) -> Path:
    """The safetensors file at `text`, or the one in the checkpoint folder that it is."""
    found = resolve_path(text)
    return found / "weights.safetensors" if found.is_dir() else found


RELEASES = Path(unirl.__file__).parent / "models" / "releases"
"""Configuration files of published models, without weights, a folder each."""


def release_names() -> tuple[str, ...]:
    """Names that model.release can have."""
    return tuple(sorted(folder.name for folder in RELEASES.iterdir() if folder.is_dir()))
