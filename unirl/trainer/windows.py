"""Windows of rollouts and what is due after them: pure arithmetic of rollout ids."""

from __future__ import annotations

from collections.abc import Iterator


def windows(start: int, num_rollouts: int, size: int) -> Iterator[range]:
    """Consecutive ranges of `size` rollout ids from `start` up to `num_rollouts`."""
    for first in range(start, num_rollouts, size):
        yield range(first, min(first + size, num_rollouts))


def sync_is_due(rollout_id: int, interval: int, begun_at: int | None, was_saved: bool) -> bool:
    """Before this rollout: every `interval` rollouts but the first, where the run began with a
    checkpoint's weights, and after a scheduled save, so that a run resumed there is the same run.
    """
    by_interval = rollout_id > 0 and rollout_id % interval == 0
    return by_interval or rollout_id == begun_at or (rollout_id > 0 and was_saved)
