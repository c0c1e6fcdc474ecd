"""Advantage Weighted Matching (arXiv:2509.25050): policy gradient with the pretraining loss.

    log_prob = -(mean (v(x_t, t) - (noise - x0))^2)^error_power      at one noise and level t
    ratio = exp(log_prob - log_prob_old)                             at the same noise and t
    loss = max(-A ratio, -A clip(ratio, 1 - clip_range, 1 + clip_range_high))
           + kl_coefficient mean (v - v_ref)^2

Minus the velocity error is the evidence lower bound of log p(x0) at one level, up to a weight; so
samples of high advantage become likelier without a stochastic step. At the first update the
gradient is that of A times the velocity error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.algorithms.anchored import Anchored
from unirl.algorithms.base import Algorithm, DifferentiableReward, Policy, RowLosses
from unirl.algorithms.renoised import (
    BasePenalty,
    RenoisedRows,
    all_renoised,
    mean_square,
    velocity_of,
)
from unirl.algorithms.surrogate import ClipRange, ratio_metrics
from unirl.config.catalog import ALGORITHMS
from unirl.config.schema import AlgorithmConfig
from unirl.core.types import ScoredRollout


@dataclass(frozen=True)
class AWMRows(Anchored):
    """Renoised samples with the log-probs their ratios are taken to."""

    renoised: RenoisedRows
    old_log_prob: Tensor
    """[R] float32."""
    reference_velocity: Tensor | None
    """[R, *latent] float32; None at kl_coefficient 0."""


class AdvantageWeightedMatching(Algorithm[RenoisedRows, AWMRows]):
    """Rows are renoised samples; the anchor is their log-prob before the update."""

    capabilities = ALGORITHMS["awm"].capabilities

    def __init__(self, config: AlgorithmConfig, reward: DifferentiableReward) -> None:
        self._config = config
        self._penalty = BasePenalty(config)

    def rows(self, scored: Sequence[ScoredRollout]) -> RenoisedRows:
        return all_renoised(self._config, scored)

    def anchor(
        self, policy: Policy, rows: RenoisedRows, slices: Sequence[Tensor]
    ) -> tuple[AWMRows, Mapping[str, float]]:
        old_log_prob = torch.zeros_like(rows.time)
        for index in slices:
            part = rows.select(index)
            old_log_prob[index] = self._log_prob(part, velocity_of(policy.model, part))
        return AWMRows(rows, old_log_prob, self._penalty.reference(policy, rows, slices)), {}

    def loss(self, policy: Policy, rows: AWMRows) -> RowLosses:
        velocity = velocity_of(policy.model, rows.renoised)
        log_ratio = self._log_prob(rows.renoised, velocity) - rows.old_log_prob
        ratio = log_ratio.exp()
        clip = ClipRange.of(self._config, policy.progress)
        policy_loss = clip.loss(rows.renoised.advantages, ratio)
        details = {"log_ratio": log_ratio, **clip.details(ratio)}
        return self._penalty.added_to(policy_loss, details, velocity, rows.reference_velocity)

    def _log_prob(self, rows: RenoisedRows, velocity: Tensor) -> Tensor:
        """[R] of the samples, up to what does not depend on the weights."""
        return -(mean_square(velocity - rows.target) ** self._config.error_power)

    def metrics(self, details: Mapping[str, Tensor]) -> Mapping[str, float]:
        means = ("loss", "policy_loss", "velocity_deviation")
        averaged = {name: float(details[name].mean()) for name in means if name in details}
        return averaged | ratio_metrics(details)
