"""A training window on the shipped model as one would write it for one experiment.

Tensors, two scorers and AdamW, without a trainer, roles, records or metrics: what
`scripts/bench_loop.py` holds ours against. Which prompts and steps are drawn, and which samples
form an optimizer step, is what unirl draws, so that both do the same work. Noise is torch's own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bare.sampling import denoise
from bare.training import TRAININGS, Training
from safetensors.torch import load_file
from torch import Tensor, nn

from unirl.algorithms.making import make_algorithm
from unirl.config.catalog import MODELS, SCORERS
from unirl.config.components import import_component
from unirl.config.resources import resolve_path
from unirl.config.schema import RunConfig
from unirl.core.types import PromptRecord
from unirl.data.prompts import load_prompts
from unirl.data.stream import PromptStream
from unirl.models.lora import attach_lora
from unirl.models.tiny_dit import load_tiny_dit
from unirl.models.trainable import adapter_seed
from unirl.samplers.noise import seed_of
from unirl.samplers.window import select_sde_steps
from unirl.train.optimizer import make_optimizer


@dataclass(frozen=True)
class Batch:
    """B samples of one rollout with their paths and scores."""

    ids: Tensor
    """[B, L] token ids."""
    records: Sequence[PromptRecord]
    sigmas: Tensor
    """[T+1]."""
    sde_steps: Tensor
    """[B, S]."""
    kept_steps: tuple[int, ...]
    """Those that gradients of a reward run through."""
    path: Tensor
    """[T+1, B, 3, H, W]."""
    state: Tensor
    """[T, B]; see `denoise`."""
    log_prob: Tensor
    """[T, B]."""
    reward: Tensor
    """[B] weighted total."""
    advantage: Tensor
    """[B]."""


class BareLoop:
    """The loop of one of the recipes that `bench_loop.py` compares."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.base, self.tokenizer = load_tiny_dit(resolve_path(config.model.path))
        self.base.requires_grad_(False)
        self.network = with_adapter(self.base, config)
        self.old = copy.deepcopy(self.network)
        self.teacher = copy.deepcopy(self.network)
        for file in config.algorithm.teachers.values():
            self.teacher.load_state_dict(load_file(resolve_path(file)), strict=False)
        self.samples_with_old = config.algorithm.path == "diffusion_nft"
        self.parameters = [p for p in self.network.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.parameters, config.stack.optimizer)
        self.num_steps = 0
        self.scorers = scorers_of(config)
        records = load_prompts(resolve_path(config.data.train), "data.train")
        self.stream = PromptStream(records, config.batch_size, config.seed)
        self.kept_steps = make_algorithm(config.algorithm).kept_steps

    @property
    def networks(self) -> list[nn.Module]:
        """All that are ever asked."""
        return [self.base, self.network, self.old, self.teacher]

    def velocity(self, network: nn.Module, x: Tensor, s: Tensor, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.model.precision == "bf16"):
            return network(x, s, ids).float()

    def window(self, rollout_id: int) -> None:
        """One rollout and the updates on it."""
        batch = self.sample(rollout_id)
        with torch.no_grad():
            training = TRAININGS[self.config.algorithm.path](self, batch)
            parts = [
                [(rows, training.fixed(rows)) for rows in part]
                for part in self.parts(training.sample)
            ]
        for part in parts:
            self.update(training, part)
        if self.samples_with_old:
            self.follow()

    # --- rollout ---------------------------------------------------------------------------------

    def sample(self, rollout_id: int) -> Batch:
        config, sampling = self.config, self.config.sampling
        group, seed, count = sampling.samples_per_prompt, config.seed, sampling.num_inference_steps
        records = [r for r in self.stream.batch(rollout_id).records for _ in range(group)]
        ids = self.tokenizer.encode([record.text for record in records])
        per_start = sampling.num_samples_per_start
        steps: tuple[tuple[int, ...], ...] = ((),) * group
        if sampling.eta > 0:
            steps = select_sde_steps(sampling.sde_steps, count, rollout_id, seed, group, per_start)
        sde_steps = torch.tensor(steps, dtype=torch.int64).repeat(config.batch_size, 1)
        kept_steps = self.kept_steps(count, rollout_id, seed)
        behind = max([*sde_steps.flatten().tolist(), *kept_steps], default=-1) + 1
        levels = [*range(behind), *range(behind, count, sampling.thin_after), count]
        sigmas = 1 - torch.tensor(levels) / count
        velocity = partial(self.velocity, self.old if self.samples_with_old else self.network)
        path, state, log_prob = denoise(sampling, velocity, sigmas, ids, sde_steps, per_start)
        reward, advantage = self.score(path[-1], records)
        return Batch(
            ids, records, sigmas, sde_steps, kept_steps, path, state, log_prob, reward, advantage
        )

    def score(self, x: Tensor, records: Sequence[PromptRecord]) -> tuple[Tensor, Tensor]:
        """[B] weighted total, and [B] advantages among siblings: of the total, or of each scorer,
        added by weight."""
        config, clip = self.config, self.config.algorithm.adv_clip_max
        images = ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        scores = [(torch.as_tensor(s.score(images, records)), weight) for s, weight in self.scorers]
        total = torch.stack([weight * score for score, weight in scores]).sum(0)
        compared = scores if config.adv_per_component else [(total, 1)]
        advantages = torch.stack([weight * self.relative(score) for score, weight in compared])
        return total, advantages.sum(0).clamp(-clip, clip)

    def relative(self, score: Tensor) -> Tensor:
        config, sampling = self.config, self.config.sampling
        by_start = config.adv_group == "start"
        siblings = sampling.num_samples_per_start if by_start else sampling.samples_per_prompt
        groups = score.view(-1, siblings)
        std = groups.std(1, correction=config.adv_ddof, keepdim=True)
        return ((groups - groups.mean(1, keepdim=True)) / (std + config.adv_epsilon)).flatten()

    def differentiable_reward(self, x: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        images = (x.clamp(-1, 1) + 1) / 2
        scores = [w * scorer.score_differentiable(images, records) for scorer, w in self.scorers]
        return torch.stack(scores).sum(0)

    # --- update ----------------------------------------------------------------------------------

    def parts(self, sample: Tensor) -> list[list[Tensor]]:
        """Rows of each optimizer step in micro-batches; each takes a part of every group."""
        config, stack = self.config, self.config.stack
        group = config.sampling.samples_per_prompt
        generator = torch.Generator().manual_seed(seed_of(f"{config.seed}/parts/{self.num_steps}"))
        turns = torch.rand(config.batch_size, group, generator=generator).argsort(1)
        part = (turns * stack.num_updates_per_batch // group).flatten()[sample]
        rows = [torch.nonzero(part == n).flatten() for n in range(stack.num_updates_per_batch)]
        return [list(of_part.split(stack.micro_batch_size)) for of_part in rows]

    def update(self, training: Training, part: Sequence[tuple[Tensor, Tensor]]) -> None:
        count = sum(len(rows) for rows, _ in part)
        for rows, fixed in part:
            (training.loss(rows, fixed).sum() / count).backward()
        nn.utils.clip_grad_norm_(self.parameters, self.config.stack.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1

    @torch.no_grad()
    def follow(self) -> None:
        """old <- d old + (1 - d) trained."""
        settings = self.config.algorithm
        rise = settings.old_decay_rate * max(0, self.num_steps - settings.old_decay_start)
        for old, new in zip(self.old.parameters(), self.network.parameters(), strict=True):
            if new.requires_grad:
                old.lerp_(new, 1 - min(rise, settings.old_decay_max))


def scorers_of(config: RunConfig) -> list[tuple[Any, float]]:
    """With their weights."""
    scorers = config.reward.scorers.values() if config.reward else ()
    return [(import_component(SCORERS[s.path].path)(**s.args), s.weight) for s in scorers]


def with_adapter(base: nn.Module, config: RunConfig) -> nn.Module:
    network, lora = copy.deepcopy(base), config.stack.lora
    assert lora is not None, "the recipes that are compared train an adapter"
    targets = lora.target_modules or MODELS[config.model.family].lora_targets
    attach_lora(network, lora.rank, lora.alpha, targets, adapter_seed(config))
    return network
