"""Ask the network once where rows of a batch are the same question.

Samples of a group that start from the same noise are one and the same until their first stochastic
step, and that step's velocity is the same too. So a group of G costs one row there instead of G, in
sampling and in training.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Distinct:
    """The distinct rows of a batch of B."""

    first: Tensor
    """[U] int64, ascending: the first row of each kind."""
    kind: Tensor
    """[B] int64 in 0..U-1: the kind of each row, so that rows[first][kind] are all rows."""

    def __len__(self) -> int:
        return len(self.first)


def distinct(names: Sequence[Hashable]) -> Distinct:
    """Rows with equal names are the same."""
    first = {name: row for row, name in reversed(list(enumerate(names)))}
    number_of = {name: number for number, name in enumerate(sorted(first, key=first.__getitem__))}
    return Distinct(
        torch.tensor(sorted(first.values())), torch.tensor([number_of[name] for name in names])
    )


def distinct_ids(ids: Tensor) -> Distinct:
    """Rows with equal ids [B] are the same; where all differ, rows keep their order."""
    kinds, kind = torch.unique(ids, return_inverse=True)
    rows = torch.arange(len(ids), device=ids.device)
    first = rows.new_full((len(kinds),), len(ids)).scatter_reduce_(0, kind, rows, "amin")
    return Distinct(first, kind)
