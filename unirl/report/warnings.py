"""What a run warned of, each thing once."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from unirl.report.reading import RunFiles

_LEVELS = ("WARNING", "ERROR", "CRITICAL")
_MOST_LINES = 12


@dataclass(frozen=True)
class Warned:
    level: str
    message: str
    """Of the first time."""
    count: int
    since: str


def warned(run: RunFiles) -> list[Warned]:
    """Messages that differ in their numbers alone are one; in order of their first time."""
    first = {}
    counts: Counter[tuple[str, str]] = Counter()
    for entry in run.log:
        if entry.level in _LEVELS:
            key = (entry.level, re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", entry.message))
            counts[key] += 1
            first.setdefault(key, entry)
    return [
        Warned(
            entry.level.lower(), _shortened(entry.message), counts[key], f"{entry.time:%H:%M:%S}"
        )
        for key, entry in first.items()
    ]


def _shortened(message: str) -> str:
    """Of a long traceback the beginning and the end, which says what went wrong."""
    lines = message.splitlines()
    if len(lines) <= _MOST_LINES:
        return message
    half = _MOST_LINES // 2
    return "\n".join([*lines[:half], "...", *lines[-half:]])
