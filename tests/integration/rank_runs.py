"""Runs of the real command line on several ranks, and how their numbers compare."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_pool import RankPool
from runs import Run, train
from torch import Tensor

from unirl.checkpoint.shards import SHARDS

SMOOTH = ("stack.optimizer.adam_epsilon=1e-3", "stack.optimizer.learning_rate=0.03")
"""AdamW as a smooth function of the gradients. With an epsilon below them, an element whose
gradient is only rounding takes a whole step in a direction that rounding decides; two sums of the
same gradients in another order then drift apart from the second step on."""

ROUNDING = 1e-3
"""Largest difference of weights after equal steps, relative to how far the weights have moved."""


def train_on(
    pool: RankPool, num_ranks: int, directory: Path, *overrides: str, recipe: str = "quickstart"
) -> Run:
    """`runs.train` on several ranks, or in this process for one; all must end well."""
    if num_ranks == 1:
        run = train(directory, *overrides, recipe=recipe)
        assert run.exit_code == 0, run.errors
        return run
    words = (f"num_devices={num_ranks}", *overrides)
    runs = pool.run(num_ranks, train, directory, *words, recipe=recipe)
    assert [run.exit_code for run in runs] == [0] * num_ranks, runs[0].errors
    assert [run.output for run in runs[1:]] == [""] * (num_ranks - 1)
    return runs[0]


def train_elsewhere(folders: Sequence[str], words: Sequence[Sequence[str]], directory: Path) -> Run:
    """A rank that works in a folder of its own and was given overrides of its own."""
    rank = int(os.environ["RANK"])
    os.chdir(folders[rank])
    return train(directory, *words[rank])


def sampling_numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """What sampling and scoring gave, in a row of metrics: equal bits on any number of ranks."""
    return {name: value for name, value in row.items() if name.startswith(("rollout/", "eval/"))}


def assert_close_rows(
    left: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]]
) -> None:
    """Rows with the same names, and numbers that are equal but for rounding."""
    assert [row.keys() for row in left] == [row.keys() for row in right]
    for one, other in zip(left, right, strict=True):
        for name in one:
            assert one[name] == _close(other[name]), name


def _close(value: Any) -> Any:
    return pytest.approx(value, rel=1e-3, abs=1e-6) if isinstance(value, float) else value


def saved_shards(folder: Path) -> dict[str, Tensor]:
    """All tensors of a sharded checkpoint, whole."""
    reader = dcp.FileSystemReader(folder / SHARDS)
    saved: Any = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size) for name, entry in saved.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def drift(
    left: Mapping[str, Tensor], right: Mapping[str, Tensor], start: Mapping[str, Tensor]
) -> float:
    """Largest difference of two sets of weights, relative to the largest move since `start`."""
    assert left.keys() == right.keys() == start.keys()
    moved = max(float((left[name] - start[name]).abs().max()) for name in left)
    assert moved > 0
    return max(float((left[name] - right[name]).abs().max()) for name in left) / moved
