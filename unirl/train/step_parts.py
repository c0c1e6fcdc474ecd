"""Which rows of a window form which optimizer step, in slices of the micro-batch size.

A sample's step depends on the samples of all ranks, so it is the same however they are spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unirl.algorithms.base import Rows
from unirl.config.schema import StackConfig
from unirl.core.types import ScoredRollout
from unirl.distributed.ranks import Ranks
from unirl.samplers.noise import seed_of


@dataclass(frozen=True)
class StepPart:
    """This rank's rows of one optimizer step."""

    slices: Sequence[Tensor]
    """Row indices, at most micro_batch_size each; as many slices on every rank."""
    num_fillers: int
    """The last slices only keep the other ranks company: they do not count."""
    num_rows: int
    """Rows of the step on all ranks."""


def split_into_steps(
    rows: Rows, scored: Sequence[ScoredRollout], config: StackConfig, ranks: Ranks, draw: str
) -> list[StepPart]:
    """This rank's rows of each of the window's num_updates_per_batch optimizer steps.

    Rows of samples that are not trained are left out, and so are steps without any row. A rank
    that has less to do than another fills up with slices of the row behind its last, which it does
    not have. `draw` seeds the order of shuffled samples. Collective.
    """
    num_parts, size = config.num_updates_per_batch, config.micro_batch_size
    filler = torch.tensor([len(rows)], device=rows.sample_index.device)
    starts = np.cumsum([0, *(one.num_samples for one in scored)]).tolist()
    samples = torch.cat([s + one.places for s, one in zip(starts, scored, strict=False)])
    trained = torch.cat([one.trained for one in scored])[samples]
    group_size = scored[0].request.samples_per_prompt
    num_groups = starts[-1] // group_size
    shuffled = config.shuffle_updates
    places = _shuffled(num_groups, group_size, draw)[samples] if shuffled else samples
    part_of_sample = torch.where(trained, places * num_parts // starts[-1], -1)
    part_of_row = part_of_sample.to(rows.sample_index.device)[rows.sample_index]
    part_of_row = part_of_row.where(rows.sample_index >= 0, -1)
    own = [torch.nonzero(part_of_row == part).flatten() for part in range(num_parts)]
    counts = ranks.gather([len(index) for index in own])
    parts = []
    for index, rank_counts in zip(own, zip(*counts, strict=True), strict=True):
        slices = list(index.split(size)) if len(index) else []
        num_fillers = max(-(-count // size) for count in rank_counts) - len(slices)
        if sum(rank_counts):
            slices += [filler] * num_fillers
            parts.append(StepPart(slices, num_fillers, sum(rank_counts)))
    return parts


def _shuffled(num_groups: int, group_size: int, draw: str) -> Tensor:
    """[num_groups * group_size] each sample's place in the order that is cut into parts: each part
    takes equally many samples of every group, drawn at random."""
    generator = torch.Generator().manual_seed(seed_of(draw))
    turns = torch.rand(num_groups, group_size, generator=generator).argsort(dim=1)
    groups = torch.randperm(num_groups, generator=generator)
    return (turns * num_groups + groups[:, None]).flatten()
