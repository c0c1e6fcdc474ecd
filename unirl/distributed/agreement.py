"""What all ranks must have in common before anything loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from unirl.core.errors import ConfigError
from unirl.distributed.ranks import Ranks


def require_same_settings(settings: Mapping[str, object], ranks: Ranks) -> None:
    """Raise ConfigError on all ranks, naming the keys, unless every rank has the same values."""
    every = ranks.gather(dict(settings))
    for rank, other in enumerate(every):
        differing = [
            f"{key} is {every[0].get(key)!r} on rank 0 and {other.get(key)!r} on rank {rank}"
            for key in sorted(every[0].keys() | other.keys())
            if every[0].get(key) != other.get(key)
        ]
        if differing:
            raise ConfigError(
                "the ranks were not started alike: " + "; ".join(differing[:5]) + ". Start all of "
                "them with the same recipe, overrides, files and versions."
            )


def require_visible(path: Path, why: str, ranks: Ranks) -> None:
    """Raise ConfigError on all ranks, naming path and rank, unless every rank sees the path."""

    def look() -> None:
        if not path.exists():
            raise ConfigError(f"{path.absolute()} is not there on this rank, {why}")

    ranks.together(look)
