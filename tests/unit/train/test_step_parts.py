"""Which rows form which optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from builders import (
    rollout_request,
    run_config,
    sample,
    scored,
    tiny_model,
    train_stack,
)
from stacks import roll_out

from unirl.algorithms.flow_grpo import RatioRows
from unirl.core.types import ScoredRollout
from unirl.distributed.ranks import OneRank
from unirl.train.step_parts import StepPart, split_into_steps


def split(
    rows: RatioRows, one: ScoredRollout, overrides: Mapping[str, Any], draw: str = ""
) -> list[StepPart]:
    return split_into_steps(rows, [one], run_config(overrides).stack, OneRank(), draw)


def test_each_update_trains_on_its_own_part_of_the_samples():
    model = tiny_model()
    one = roll_out(model)
    rows = train_stack(model)._algorithm.rows([one])
    overrides = {"stack.num_updates_per_batch": 4, "stack.micro_batch_size": 3}
    parts = [list(part.slices) for part in split(rows, one, overrides)]
    samples = [set(rows.sample_index[torch.cat(part)].tolist()) for part in parts]
    assert samples == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
    assert sorted(torch.cat([i for part in parts for i in part]).tolist()) == list(range(16))
    assert {len(index) for part in parts for index in part} == {3, 1}


def test_shuffled_parts_cover_all_samples_and_are_a_function_of_the_draw():
    model = tiny_model()
    one = roll_out(model)
    rows = train_stack(model)._algorithm.rows([one])

    def parts(draw: str) -> list[set[int]]:
        overrides = {"stack.num_updates_per_batch": 2, "stack.shuffle_updates": True}
        steps = split(rows, one, overrides, draw)
        return [set(rows.sample_index[torch.cat(list(part.slices))].tolist()) for part in steps]

    drawn = [parts(f"draw-{number}") for number in range(12)]
    assert all(len(first) == 4 and first | second == set(range(8)) for first, second in drawn)
    assert all(sum(sample < 4 for sample in first) == 2 for first, _ in drawn)
    assert drawn == [parts(f"draw-{number}") for number in range(12)]
    assert len({frozenset(first) for first, _ in drawn}) > 6


def test_dropped_groups_leave_fewer_rows_but_the_same_training():
    valid = torch.tensor([False] * 4 + [True] * 4)
    model = tiny_model()
    rollout = sample(model, rollout_request(), forward_batch_size=4)
    one = scored(rollout, valid=valid)
    stack = train_stack(model)
    (part,) = split(stack._algorithm.rows([one]), one, {})
    assert part.num_rows == 8
    (stats,) = stack.update([one])
    assert stats.skipped is None
