"""Conditioning of a window's rollouts, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from unirl.core.types import Conditioning

C = TypeVar("C", bound=Conditioning | None)


def join_conditioning(parts: Sequence[C]) -> C:
    """Of all samples of all rollouts; None where there is none."""
    present = [part for part in parts if part is not None]
    return type(present[0]).cat(present) if present else parts[0]
