"""Advantages: how much better a sample is than its siblings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unirl.core.types import Rewards

EPSILON = 1e-8


def reward_advantages(
    rewards: Rewards,
    weights: Mapping[str, float],
    group_size: int,
    *,
    per_component: bool,
    use_global_std: bool,
    clip_max: float,
) -> Tensor:
    """[B] advantages of the total reward, clipped to +-clip_max, float32.

    With per_component, each scorer's advantages are computed on their own and added by weight
    (GDPO), so that no scorer counts more for being spread wider in a group.
    """
    if per_component:
        advantages = torch.stack(
            [
                weights[name] * group_relative(scores, rewards.valid, group_size, use_global_std)
                for name, scores in rewards.components.items()
            ]
        ).sum(dim=0)
    else:
        advantages = group_relative(rewards.total, rewards.valid, group_size, use_global_std)
    return advantages.clamp(-clip_max, clip_max)


def group_relative(rewards: Tensor, valid: Tensor, group_size: int, use_global_std: bool) -> Tensor:
    """[B] reward minus its prompt group's mean, over a std, float32 (GRPO, arXiv:2402.03300).

    rewards [B] float32 and valid [B] bool are prompt-major, group_size samples a prompt. The std is
    the group's, or with use_global_std that of all valid rewards of the batch; both are population
    stds. Samples that are not valid take no part and get 0, as do groups of equal rewards.
    """
    grouped = rewards.float().view(-1, group_size)
    weight = valid.view(-1, group_size).float()
    grouped = torch.where(weight > 0, grouped, torch.zeros_like(grouped))
    count = weight.sum(dim=1, keepdim=True).clamp_min(1)
    centred = (grouped - grouped.sum(dim=1, keepdim=True) / count) * weight
    if use_global_std:
        std = rewards[valid].float().std(correction=0) if valid.any() else rewards.new_zeros(())
    else:
        std = ((centred**2).sum(dim=1, keepdim=True) / count).sqrt()
    # A group of equal rewards has no signal; its rounding residue must not be blown up by 1 / eps.
    flat = centred.abs().amax(dim=1, keepdim=True) <= 1e-6 * grouped.abs().amax(dim=1, keepdim=True)
    advantages = torch.where(flat, torch.zeros_like(centred), centred / (std + EPSILON))
    return advantages.flatten()
