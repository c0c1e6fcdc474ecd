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
