"""Small models, prompts, rollouts and roles for unit tests: 8 x 8 pixels, a few thousand weights.

The network is a `TinyDiT` with random weights everywhere, so that every LoRA layer matters.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from unirl.algorithms.advantage import group_relative
from unirl.algorithms.base import BASE, Policy
from unirl.algorithms.making import make_algorithm
from unirl.config.schema import RunConfig
from unirl.core.components import Movable, Moved
from unirl.core.types import (
    MAIN_SUITE,
    PromptBatch,
    PromptRecord,
    PromptSuite,
    Rewards,
    Rollout,
    RolloutRequest,
    SamplingParams,
    ScoredRollout,
)
from unirl.distributed.ranks import OneRank
from unirl.memory.hostmem import HostArena, HostLimit
from unirl.models.base import DiffusionModel
from unirl.models.lora import adapter_disabled, adapter_parameters, attach_lora
from unirl.models.tiny import TinyModel
from unirl.models.tiny_dit import TinyDiT, TinyDiTConfig, TinyTokenizer
from unirl.residency.directory import Directory
from unirl.residency.ledger import Ledger
from unirl.residency.perfetto import TraceFile
from unirl.residency.policy import Role
from unirl.residency.trace import TransitionLog
from unirl.residency.transaction import Transaction
from unirl.residency.transition import Transition
from unirl.rollout.sampling import sample_with_model
from unirl.train.backend import WholeBackend
from unirl.train.stack import TrainStack

SIZE = 8
LATENT_SHAPE = (3, SIZE, SIZE)
LORA_TARGETS = ("qkv", "proj", "fc1", "fc2")
WORDS = ("<pad>", "red", "green", "blue", "cat", "dog", "house")
CPU = torch.device("cpu")


def tiny_model(
    *,
    compute_dtype: torch.dtype = torch.float32,
    frozen_dtype: torch.dtype = torch.float32,
    lora_rank: int | None = 2,
    seed: int = 0,
) -> TinyModel:
    """A model whose output depends on every weight; all weights trained with lora_rank=None."""
    network = TinyDiT(
        TinyDiTConfig(
            vocabulary_size=len(WORDS),
            num_tokens=3,
            height=SIZE,
            width=SIZE,
            dim=16,
            depth=1,
            num_heads=2,
            stem_channels=4,
        )
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    network = network.to(frozen_dtype).eval().requires_grad_(False)
    if lora_rank is None:
        network.float().requires_grad_(True)
    else:
        attach_lora(network, lora_rank, 2.0 * lora_rank, LORA_TARGETS, seed)
    return TinyModel(Path(), network, TinyTokenizer(WORDS, 3), compute_dtype)


def randomize_adapter(model: TinyModel, scale: float = 0.3, seed: int = 1) -> None:
    """Make B != 0, so that the adapter changes the output."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter_parameters(model.network).values():
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale


def run_config(overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """A small run of 4 prompts x 4 samples at 5 steps; overrides by dotted key."""
    tree: dict[str, Any] = {
        "batch_size": 4,
        "num_rollouts": 4,
        "eval_samples_per_prompt": 2,
        "sampling": {
            "samples_per_prompt": 4,
            "num_inference_steps": 5,
            "height": SIZE,
            "width": SIZE,
            "sde_steps": {"strategy": "random", "num_steps": 2},
        },
        "stack": {"lora": {"rank": 2, "alpha": 4.0}, "micro_batch_size": 4},
        "algorithm": {"clip_range": 1e-3},
    }
    for key, value in (overrides or {}).items():
        *blocks, last = key.split(".")
        block = tree
        for name in blocks:
            block = block.setdefault(name, {})
        block[last] = value
    return RunConfig.model_validate(tree)


def train_stack(model: TinyModel, overrides: Mapping[str, Any] | None = None) -> TrainStack:
    """A train stack with FlowGRPO unless algorithm.path says else; overrides as in `run_config`."""
    config = run_config(overrides)
    algorithm = make_algorithm(config.algorithm)
    return TrainStack(
        model,
        WholeBackend(),
        algorithm,
        config.stack,
        10,
        sampling_params(),
        config.seed,
        CPU,
        OneRank(),
        host_arena(),
    )


def host_arena() -> HostArena:
    """Plenty of pageable host memory."""
    return HostArena(HostLimit(2**34, "test"), pin=False)


class HasParts(Protocol):
    @property
    def parts(self) -> Sequence[Movable]: ...


_DIRECTORIES: weakref.WeakKeyDictionary[HasParts, Directory] = weakref.WeakKeyDictionary()


def _move(role: HasParts, to_device: bool) -> Moved:
    """All of one role, as the planner moves it; a role keeps its directory through a test."""
    directory = _DIRECTORIES.setdefault(role, Directory(role.parts))
    parts = [part for part in role.parts if part.is_resident != to_device]
    moves = Transaction(directory, Ledger(None)).run(parts, to_device=to_device)
    return Transition(1, Role.TRAIN, to_device, "test", moves, 0.0).moved


def offload(role: HasParts) -> Moved:
    return _move(role, to_device=False)


def onload(role: HasParts) -> Moved:
    return _move(role, to_device=True)


def records(num_prompts: int) -> tuple[PromptRecord, ...]:
    """Prompts with distinct texts the tiny model knows."""
    texts = [f"{color} {thing}" for color in WORDS[1:4] for thing in WORDS[4:]]
    return tuple(
        PromptRecord(str(i), texts[i], {"text": texts[i].upper()}) for i in range(num_prompts)
    )


def main_suite(count: int, samples_per_prompt: int = 2) -> PromptSuite:
    """The first `count` records as data.eval."""
    return PromptSuite(MAIN_SUITE, records(count), samples_per_prompt)


def sampling_params(
    *,
    num_steps: int = 5,
    guidance_scale: float = 1.0,
    height: int = SIZE,
    width: int = SIZE,
    eta: float = 0.7,
    kernel: str = "flow",
) -> SamplingParams:
    """Of the tiny model unless said otherwise."""
    return SamplingParams(num_steps, guidance_scale, height, width, eta, kernel)


def prompts(*texts: str) -> tuple[PromptRecord, ...]:
    """Records of texts alone."""
    return tuple(PromptRecord(str(number), text) for number, text in enumerate(texts))


def rollout_request(
    *,
    num_prompts: int = 2,
    samples_per_prompt: int = 4,
    num_steps: int = 5,
    sde_steps: Sequence[int] = (0, 2),
    guidance_scale: float = 1.0,
    kernel: str = "flow",
    eta: float = 0.7,
    weight_version: int | None = 0,
    key: str = "test",
) -> RolloutRequest:
    """A request with distinct noise for every sample."""
    keys = tuple(f"{key}/{sample}" for sample in range(num_prompts * samples_per_prompt))
    return RolloutRequest(
        prompts=PromptBatch(records(num_prompts)),
        samples_per_prompt=samples_per_prompt,
        sampling=sampling_params(
            num_steps=num_steps, guidance_scale=guidance_scale, eta=eta, kernel=kernel
        ),
        sigmas=(*(1 - step / num_steps for step in range(num_steps)), 0.0),
        sde_steps=(tuple(sde_steps),) * len(keys),
        initial_noise_keys=keys,
        step_noise_keys=keys,
        weight_version=weight_version,
    )


def sample(model: TinyModel, request: RolloutRequest, forward_batch_size: int = 0) -> Rollout:
    return sample_with_model(model, request, forward_batch_size, CPU)


def scored(
    rollout: Rollout, rewards: Tensor | None = None, valid: Tensor | None = None
) -> ScoredRollout:
    """The rollout with rewards (default: distinct ones) and their group-relative advantages."""
    count = len(rollout.request)
    if rewards is None:
        rewards = torch.randn(count, generator=torch.Generator().manual_seed(5))
    if valid is None:
        valid = torch.ones(count, dtype=torch.bool)
    group_size = rollout.request.samples_per_prompt
    return ScoredRollout(
        rollout.request,
        rollout.trajectory,
        rollout.conditioning,
        rollout.negative_conditioning,
        torch.arange(count),
        Rewards(rewards, {"only": rewards}, valid),
        group_relative(rewards, valid, group_size, use_global_std=False),
        valid,
    )


def policy(model: DiffusionModel, progress: float = 0.0) -> Policy:
    """A policy without shadows."""
    return Policy(model, {BASE: lambda: adapter_disabled(model.network)}, progress)


def weights(model: TinyModel) -> dict[str, Tensor]:
    """Copies of all network parameters."""
    return {name: p.detach().clone() for name, p in model.network.named_parameters()}


def same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Whether both hold the same names with bit-identical tensors."""
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def transition_log(folder: Path) -> TransitionLog:
    """Writes into the folder."""
    return TransitionLog(folder / "transitions.jsonl", TraceFile(folder / "trace.json", rank=0))
