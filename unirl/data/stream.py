"""Decides which prompts a rollout trains on: a pure function of (seed, rollout id).

There is no cursor and no loader state, so a resumed run draws what the unbroken run would have
drawn. Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from unirl.core.errors import DataError
from unirl.core.types import PromptBatch, PromptRecord


class PromptStream:
    """Batches of distinct prompts, each epoch in a new order.

    An epoch has floor(N / batch_size) batches; the prompts left over differ from epoch to epoch.

        stream = PromptStream(records, batch_size=8, seed=0)
        stream.batch(17)  # PromptBatch of 8 prompts, always the same ones

    Raises:
        DataError: there are fewer prompts than one batch takes.
    """

    def __init__(self, records: Sequence[PromptRecord], batch_size: int, seed: int) -> None:
        if batch_size > len(records):
            raise DataError(
                f"batch_size={batch_size} distinct prompts per rollout, but data.train holds "
                f"{len(records)}. Set batch_size to at most {len(records)} or add prompts."
            )
        self._records = tuple(records)
        self._batch_size = batch_size
        self._seed = seed

    @property
    def batches_per_epoch(self) -> int:
        return len(self._records) // self._batch_size

    def batch(self, rollout_id: int) -> PromptBatch:
        """The prompts of one rollout."""
        epoch, position = divmod(rollout_id, self.batches_per_epoch)
        order = _epoch_order(len(self._records), self._seed, epoch)
        start = position * self._batch_size
        chosen = order[start : start + self._batch_size]
        return PromptBatch(tuple(self._records[index] for index in chosen))


@lru_cache(maxsize=2)
def _epoch_order(num_prompts: int, seed: int, epoch: int) -> tuple[int, ...]:
    """A permutation of range(num_prompts).

    Sorting by a hash instead of shuffling with a generator: no library promises that its shuffle
    stays the same over versions, and a resume must not depend on one.
    """

    def rank(index: int) -> bytes:
        return hashlib.sha256(f"prompt order/{seed}/{epoch}/{index}".encode()).digest()

    return tuple(sorted(range(num_prompts), key=rank))
