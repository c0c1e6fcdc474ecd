"""Noise that depends on keys alone: the same on any engine, world size and after any resume."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def seed_of(key: str) -> int:
    """The first 8 bytes of blake2b(key), as a non-negative int64."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


def keyed_noise(keys: Sequence[str], shape: tuple[int, ...]) -> Tensor:
    """[len(keys), *shape] float32 N(0, 1) on the CPU; equal keys give equal rows."""
    return torch.stack(
        [torch.randn(shape, generator=torch.Generator().manual_seed(seed_of(key))) for key in keys]
    )
