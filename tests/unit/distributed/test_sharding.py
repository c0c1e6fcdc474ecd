"""Every sample belongs to one rank, and results come back in the order of the samples."""

from __future__ import annotations

import pytest
import torch
from builders import rollout_request
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.distributed.ranks import OneRank
from unirl.distributed.sharding import join_samples, own_part, own_prompts, sample_places


class Place(OneRank):
    """A rank that is only asked where it is."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size


def every_rank(world_size: int) -> list[Place]:
    return [Place(rank, world_size) for rank in range(world_size)]


@given(prompts_per_rank=st.integers(1, 6), world_size=st.integers(1, 8))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_prompts_that_divide_go_to_one_rank_each(prompts_per_rank: int, world_size: int) -> None:
    num_prompts = prompts_per_rank * world_size
    parts = [own_prompts(num_prompts, ranks) for ranks in every_rank(world_size)]
    assert sorted(prompt for part in parts for prompt in part) == list(range(num_prompts))
    assert all(part == sorted(part) for part in parts)


@given(num_prompts=st.integers(1, 20), world_size=st.integers(1, 8))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_every_rank_has_equally_many_prompts_and_none_is_missing(
    num_prompts: int, world_size: int
) -> None:
    parts = [own_prompts(num_prompts, ranks) for ranks in every_rank(world_size)]
    assert {prompt for part in parts for prompt in part} == set(range(num_prompts))
    assert {len(part) for part in parts} == {-(-num_prompts // world_size)}


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (4, 8), (2, 6)])
def test_consecutive_prompts_are_spread_over_the_ranks(start: int, stop: int) -> None:
    """So that an optimizer step on a part of them keeps every rank busy."""
    owner = {p: ranks.rank for ranks in every_rank(4) for p in own_prompts(8, ranks)}
    assert sorted(owner[prompt] for prompt in range(start, stop)) == [0, 1, 2, 3]


@given(
    num_prompts=st.integers(1, 20),
    world_size=st.integers(1, 8),
    samples_per_prompt=st.integers(1, 4),
)
@settings(derandomize=True, deadline=None, max_examples=50)
def test_joining_the_parts_gives_all_samples_in_order(
    num_prompts: int, world_size: int, samples_per_prompt: int
) -> None:
    values = torch.arange(num_prompts * samples_per_prompt * 2).view(-1, 2)
    parts = []
    for ranks in every_rank(world_size):
        places = sample_places(own_prompts(num_prompts, ranks), samples_per_prompt)
        parts.append(values[places])
    assert torch.equal(join_samples(parts, num_prompts), values)


def test_a_part_of_a_request_keeps_prompts_and_noise_together() -> None:
    request = rollout_request(num_prompts=5, samples_per_prompt=3)
    whole = list(zip(request.sample_records, request.initial_noise_keys, strict=True))
    seen = []
    for ranks in every_rank(2):
        part = own_part(request, ranks)
        assert len(part) == 3 * 3
        assert part.initial_noise_keys == part.step_noise_keys
        own = list(zip(part.sample_records, part.initial_noise_keys, strict=True))
        assert {key for _, key in own} <= set(request.initial_noise_keys)
        assert all(pair in whole for pair in own)
        seen += own
    assert all(pair in seen for pair in whole)


def test_the_part_of_one_rank_is_the_request_itself() -> None:
    request = rollout_request(num_prompts=3)
    assert own_part(request, OneRank()) is request
