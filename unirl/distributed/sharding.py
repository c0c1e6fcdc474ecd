"""Which samples of a rollout belong to which rank, and putting the ranks' results together again.

Prompt p of a request goes to rank p mod W, with all its samples: groups stay whole, and every
consecutive part of the prompts is spread over the ranks. Where the prompts do not divide (an
evaluation's last chunk), ranks repeat prompts so that all run the same network calls; what the
repetitions give is dropped when results are joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unirl.core.types import PromptBatch, RolloutRequest
from unirl.distributed.ranks import Ranks


def own_prompts(num_prompts: int, ranks: Ranks) -> list[int]:
    """Positions of this rank's prompts, ascending; as many on every rank."""
    num_turns = -(-num_prompts // ranks.world_size)
    positions = [turn * ranks.world_size + ranks.rank for turn in range(num_turns)]
    return [position % num_prompts for position in positions]


def own_part(request: RolloutRequest, ranks: Ranks) -> RolloutRequest:
    """The request for this rank's prompts; noise keys travel with their samples."""
    if ranks.world_size == 1:
        return request
    prompts = own_prompts(len(request.prompts), ranks)
    samples = sample_places(prompts, request.samples_per_prompt).tolist()
    return replace(
        request,
        prompts=PromptBatch(tuple(request.prompts.records[p] for p in prompts)),
        initial_noise_keys=tuple(request.initial_noise_keys[s] for s in samples),
        step_noise_keys=tuple(request.step_noise_keys[s] for s in samples),
        sde_steps=tuple(request.sde_steps[s] for s in samples),
    )


def sample_places(prompts: Sequence[int], samples_per_prompt: int) -> Tensor:
    """[len(prompts) * G] int64: each sample's place among all samples of all ranks."""
    first = torch.tensor(prompts, dtype=torch.int64) * samples_per_prompt
    return (first[:, None] + torch.arange(samples_per_prompt)).flatten()


def join_samples(parts: Sequence[Tensor], num_prompts: int) -> Tensor:
    """[B, ...] of all samples in order, from every rank's [b, ...], without the repetitions."""
    if len(parts) == 1:
        return parts[0]
    num_turns = -(-num_prompts // len(parts))
    # [turn, rank, sample of the prompt, ...]: exactly the order of the prompts.
    grouped = torch.stack([part.unflatten(0, (num_turns, -1)) for part in parts], dim=1)
    return grouped.flatten(0, 1)[:num_prompts].flatten(0, 1)
