"""What differs between the configuration of a checkpoint and that of the run that goes on with it.

Every key is either safe, so that the run stays the run it was, or changes what comes after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SAFE_KEYS = (
    "description",
    "run_name",
    "output_dir",
    "device",
    "num_threads",
    "num_rollouts",
    "train_resident",
    "rollout_resident",
    "reward_resident",
    "optimizer_resident",
    "residency",
    "device_budget_gib",
    "overlap_moves",
    "host_budget_gib",
    "doctor",
    "max_hours",
    "stop_on",
    "save_reads",
    "save_interval",
    "save_keep",
    "keep_best",
    "save_dir",
    "save_mode",
    "save_format",
    "load_dir",
    "start_from",
    "num_devices",
    "backend",
    "logging",
)
"""Keys, or the first part of keys, that may differ without making it another run."""

_UNSAID, _UNSET = "(not saved)", "(not set)"


@dataclass(frozen=True)
class Changes:
    """`key: old -> new`, in the order of keys."""

    safe: tuple[str, ...]
    others: tuple[str, ...]
    """From here on the run is another one than that which was saved."""


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Of two dumped configurations."""
    old, new = flatten(saved), flatten(now)
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    lines = {name: f"{name}: {old.get(name, _UNSAID)} -> {new.get(name, _UNSET)}" for name in names}
    safe = set(SAFE_KEYS) - _made_unsafe(new)
    is_safe = {name: name.split(".")[0] in safe for name in names}
    return Changes(
        tuple(lines[name] for name in names if is_safe[name]),
        tuple(lines[name] for name in names if not is_safe[name]),
    )


def _made_unsafe(now: Mapping[str, Any]) -> set[str]:
    """The length of the run counts where the learning rate or the clip range ends with it."""
    scheduler_ends = (
        now["stack.scheduler.type"] != "constant" and now["stack.scheduler.total_steps"] is None
    )
    clip_ends = now["algorithm.clip_schedule"] != "constant"
    return {"num_rollouts"} if scheduler_ends or clip_ends else set()


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
