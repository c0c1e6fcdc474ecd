"""Diffusion-DPO (arXiv:2311.12908, eq. 14): prefer the best sample of a group to the worst.

    e = mean (v(x_t, t) - (noise - x0))^2                velocity error; same noise and t in a pair
    advance = (e_ref - e)[preferred] - (e_ref - e)[rejected]
    loss = -log sigmoid(beta / 2 advance)

Errors are means over latent elements. The pairs are those of the rollouts: of each prompt's
samples the one of highest and the one of lowest total reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import softplus

from unirl.algorithms.anchored import Anchored
from unirl.algorithms.base import (
    BASE,
    Algorithm,
    DifferentiableReward,
    Policy,
    RowLosses,
    ShadowRule,
)
from unirl.algorithms.reference import EMA
from unirl.algorithms.renoised import RenoisedRows, renoised, velocity_error
from unirl.config.catalog import ALGORITHMS
from unirl.config.schema import AlgorithmConfig
from unirl.core.types import ScoredRollout
from unirl.models.base import DiffusionModel


@dataclass(frozen=True)
class PairRows:
    """R = groups x K noise levels, in the order (level number, group)."""

    preferred: RenoisedRows
    rejected: RenoisedRows
    """With the noise and levels of the preferred ones."""
    sample_index: Tensor
    """[R] int64: the preferred sample; -1 where the rewards prefer none."""

    def __len__(self) -> int:
        return len(self.sample_index)

    def select(self, index: Tensor) -> Self:
        return type(self)(
            self.preferred.select(index), self.rejected.select(index), self.sample_index[index]
        )


@dataclass(frozen=True)
class AnchoredPairs(Anchored):
    """Pairs with what the reference makes of them."""

    pairs: PairRows
    reference_gap: Tensor
    """[R] e_ref of the rejected minus e_ref of the preferred, float32."""


class DiffusionDPO(Algorithm[PairRows, AnchoredPairs]):
    """Rows are pairs at one noise level; the anchor is the reference's errors."""

    capabilities = ALGORITHMS["diffusion_dpo"].capabilities

    def __init__(self, config: AlgorithmConfig, reward: DifferentiableReward) -> None:
        self._config = config
        self._reference = BASE if config.reference == "base" else EMA

    def shadows(self) -> Mapping[str, ShadowRule]:
        if self._reference == BASE:
            return {}
        return {EMA: ShadowRule(lambda num_steps: self._config.ema_decay)}

    def rows(self, scored: Sequence[ScoredRollout]) -> PairRows:
        best, worst, is_pair = best_and_worst(scored)
        count = self._config.timesteps_per_sample
        # Noise and levels are those of a group's first sample, whichever is the best.
        rows = renoised(self._config, scored, _group_starts(scored))
        device = rows.sample_index.device
        preferred = replace(rows, sample_index=best.repeat(count).to(device))
        rejected = replace(rows, sample_index=worst.repeat(count).to(device))
        index = preferred.sample_index.where(is_pair.repeat(count).to(device), -1)
        return PairRows(preferred, rejected, index)

    def anchor(
        self, policy: Policy, rows: PairRows, slices: Sequence[Tensor]
    ) -> tuple[AnchoredPairs, Mapping[str, float]]:
        gap = torch.zeros_like(rows.preferred.time)
        with policy.using(self._reference):
            for index in slices:
                gap[index] = error_gap(policy.model, rows.select(index))
        return AnchoredPairs(rows, gap), {}

    def loss(self, policy: Policy, rows: AnchoredPairs) -> RowLosses:
        advance = error_gap(policy.model, rows.pairs) - rows.reference_gap
        margin = self._config.preference_beta / 2 * advance
        loss = softplus(-margin)
        details = {"loss": loss.detach(), "preference_margin": margin.detach()}
        return RowLosses(loss, details)

    def metrics(self, details: Mapping[str, Tensor]) -> Mapping[str, float]:
        margin = details["preference_margin"]
        return {
            "loss": float(details["loss"].mean()),
            "preference_margin": float(margin.mean()),
            "preference_accuracy": float((margin.sign() + 1).mean() / 2),  # a tie counts half
        }


def error_gap(model: DiffusionModel, pairs: PairRows) -> Tensor:
    """[R] velocity error of the rejected samples minus that of the preferred ones."""
    return velocity_error(model, pairs.rejected) - velocity_error(model, pairs.preferred)


def best_and_worst(scored: Sequence[ScoredRollout]) -> tuple[Tensor, Tensor, Tensor]:
    """Of each of this rank's g groups, the samples of highest and lowest total reward.

    Returns best [g] and worst [g] int64, which count on through the window, and [g] bool: whether
    the best is better than the worst. Only trained samples are looked at; among equals the first is
    taken.
    """
    starts = torch.tensor(_group_starts(scored))
    rewards = torch.cat([_groups(one, one.rewards.total) for one in scored])
    trained = torch.cat([_groups(one, one.trained) for one in scored])
    best = rewards.where(trained, -torch.inf).max(dim=1)
    worst = rewards.where(trained, torch.inf).min(dim=1)
    return starts + best.indices, starts + worst.indices, best.values > worst.values


def _groups(one: ScoredRollout, of_all: Tensor) -> Tensor:
    """[g, G] this rank's part of a value of all samples."""
    return of_all[one.places].view(-1, one.request.samples_per_prompt)


def _group_starts(scored: Sequence[ScoredRollout]) -> range:
    """The first sample of each of this rank's groups; all rollouts have groups of one size."""
    group_size = scored[0].request.samples_per_prompt
    return range(0, sum(len(one) for one in scored), group_size)
