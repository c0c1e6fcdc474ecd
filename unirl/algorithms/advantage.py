"""Advantages: how much better a sample is than its siblings, and which samples are trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.config.schema import RunConfig
from unirl.core.types import Rewards


@dataclass(frozen=True)
class AdvantageRule:
    """How a run turns rewards into advantages; each field is the key of that name."""

    weights: Mapping[str, float]
    """Of the scorers, for per_component."""
    group_size: int
    """Samples of a prompt."""
    siblings: int
    """Samples that are compared: the group, or those of it that share their start noise."""
    per_component: bool
    use_global_std: bool
    ddof: int
    epsilon: float
    best_of: int | None
    trim: float
    clip_max: float

    @classmethod
    def of(cls, config: RunConfig) -> AdvantageRule:
        sampling = config.sampling
        scorers = config.reward.scorers if config.reward else {}
        by_start = config.adv_group == "start"
        return cls(
            weights={name: scorer.weight for name, scorer in scorers.items()},
            group_size=sampling.samples_per_prompt,
            siblings=sampling.num_samples_per_start if by_start else sampling.samples_per_prompt,
            per_component=config.adv_per_component,
            use_global_std=config.adv_use_global_std,
            ddof=config.adv_ddof,
            epsilon=config.adv_epsilon,
            best_of=config.adv_best_of,
            trim=config.adv_trim,
            clip_max=config.algorithm.adv_clip_max,
        )

    def advantages(self, rewards: Rewards) -> Tensor:
        """[N] of the total reward, clipped to +-clip_max, float32; 0 where not valid.

        With per_component, each scorer's advantages are computed on their own and added by weight
        (GDPO), so that no scorer counts more for being spread wider in a group.
        """
        if self.per_component:
            advantages = torch.zeros_like(rewards.total, dtype=torch.float32)
            for name, scores in rewards.components.items():
                advantages = advantages + self.weights[name] * self._relative(scores, rewards.valid)
        else:
            advantages = self._relative(rewards.total, rewards.valid)
        return advantages.clamp(-self.clip_max, self.clip_max)

    def trained(self, rewards: Rewards) -> Tensor:
        """[N] bool: valid samples; with best_of only those, the best and the worst of a group."""
        if self.best_of is None:
            return rewards.valid
        # Samples that are not valid come last, behind the best.
        totals = rewards.total.masked_fill(~rewards.valid, torch.inf).view(-1, self.group_size)
        rank = totals.argsort(dim=1, stable=True).argsort(dim=1)
        count = rewards.valid.view(-1, self.group_size).sum(dim=1, keepdim=True)
        worst = self.best_of // 2
        best = self.best_of - worst
        chosen = (rank < worst) | (rank >= count - best)
        return chosen.flatten() & rewards.valid

    def _relative(self, scores: Tensor, valid: Tensor) -> Tensor:
        return group_relative(
            trimmed(scores, valid, self.trim),
            valid,
            self.siblings,
            self.use_global_std,
            ddof=self.ddof,
            epsilon=self.epsilon,
        )


def group_relative(
    rewards: Tensor,
    valid: Tensor,
    group_size: int,
    use_global_std: bool,
    *,
    ddof: int = 0,
    epsilon: float = 1e-8,
) -> Tensor:
    """[B] reward minus its prompt group's mean, over a std, float32 (GRPO, arXiv:2402.03300).

    rewards [B] float32 and valid [B] bool are prompt-major, group_size samples a prompt. The std is
    the group's, or with use_global_std that of all valid rewards of the batch; divided by n - ddof,
    and epsilon is added. Samples that are not valid take no part and get 0, as do groups of equal
    rewards and samples without siblings.
    """
    grouped = rewards.float().view(-1, group_size)
    weight = valid.view(-1, group_size).float()
    grouped = torch.where(weight > 0, grouped, torch.zeros_like(grouped))
    count = weight.sum(dim=1, keepdim=True).clamp_min(1)
    centred = (grouped - grouped.sum(dim=1, keepdim=True) / count) * weight
    if use_global_std:
        std = _global_std(rewards[valid].float(), ddof)
    else:
        std = ((centred**2).sum(dim=1, keepdim=True) / (count - ddof).clamp_min(1)).sqrt()
    # A group of equal rewards has no signal; its rounding residue must not be blown up by 1 / eps.
    flat = centred.abs().amax(dim=1, keepdim=True) <= 1e-6 * grouped.abs().amax(dim=1, keepdim=True)
    advantages = torch.where(flat, torch.zeros_like(centred), centred / (std + epsilon))
    return advantages.flatten()


def trimmed(rewards: Tensor, valid: Tensor, quantile: float) -> Tensor:
    """[B] rewards taken back to the quantile and 1 - quantile of the valid ones."""
    if quantile == 0 or not valid.any():
        return rewards
    present = rewards[valid].float()
    return rewards.clamp(present.quantile(quantile), present.quantile(1 - quantile))


def _global_std(rewards: Tensor, ddof: int) -> Tensor:
    return rewards.std(correction=ddof) if len(rewards) > ddof else rewards.new_zeros(())
