"""Flow-DPPO (arXiv:2606.11025): steps that have moved too far and would move on are left out.

    kl   = mean (mu_new - mu_old)^2 / (2 std^2)           nats per latent element
    out  = kl >= kl_mask_threshold and (ratio > 1 and A > 0, or ratio < 1 and A < 0)
    loss = (0 if out, else -A ratio) + kl_coefficient KL to the reference

The trust region is a divergence between distributions, not the clipping of one sample's ratio; the
ratio itself is not clipped. mu and std are those of the step, std in full (with sqrt(-dt)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unirl.algorithms.anchors import OldPolicyRows, replayed_velocities
from unirl.algorithms.base import Algorithm, DifferentiableReward, Policy, RowLosses, ShadowRule
from unirl.algorithms.reference import ReferencePenalty, loss_metrics
from unirl.algorithms.surrogate import ratio_metrics
from unirl.algorithms.transitions import (
    TransitionRows,
    transition_of,
    transition_rows,
    velocity_of,
)
from unirl.config.catalog import ALGORITHMS
from unirl.config.schema import AlgorithmConfig
from unirl.core.types import ScoredRollout


class FlowDPPO(Algorithm[TransitionRows, OldPolicyRows]):
    """Rows are transitions; the anchor is the old policy's velocity, replayed."""

    capabilities = ALGORITHMS["flow_dppo"].capabilities

    def __init__(self, config: AlgorithmConfig, reward: DifferentiableReward) -> None:
        self._threshold = config.kl_mask_threshold
        self._penalty = ReferencePenalty(config)

    def shadows(self) -> Mapping[str, ShadowRule]:
        return self._penalty.shadows()

    def rows(self, scored: Sequence[ScoredRollout]) -> TransitionRows:
        return transition_rows(scored)

    def anchor(
        self, policy: Policy, rows: TransitionRows, slices: Sequence[Tensor]
    ) -> tuple[OldPolicyRows, Mapping[str, float]]:
        return replayed_velocities(policy, rows, slices)

    def loss(self, policy: Policy, rows: OldPolicyRows) -> RowLosses:
        transitions, old = rows.transitions, rows.old
        reference = self._penalty.reference(policy, transitions)
        velocity = velocity_of(policy.model, transitions)
        new = transition_of(transitions, velocity)
        value, advantages = transitions.next_latents, transitions.advantages
        log_ratio = new.log_prob(value) - old.log_prob(value)
        kl_old = new.kl(old).detach()
        too_far = kl_old >= self._threshold
        out_high = too_far & (log_ratio > 0) & (advantages > 0)
        out_low = too_far & (log_ratio < 0) & (advantages < 0)
        policy_loss = kept_loss(log_ratio, advantages, out_high | out_low)
        details = {
            "log_ratio": log_ratio,
            "kl_old": kl_old,
            "clipped_high": out_high.float(),
            "clipped_low": out_low.float(),
        }
        return self._penalty.added_to(policy_loss, details, transitions, velocity, reference)

    def metrics(self, details: Mapping[str, Tensor]) -> Mapping[str, float]:
        kl_old = details["kl_old"]
        return {
            **loss_metrics(details),
            **ratio_metrics(details),
            "kl_old_mean": float(kl_old.mean()),
            "kl_old_max": float(kl_old.max()),
        }


def kept_loss(log_ratio: Tensor, advantages: Tensor, out: Tensor) -> Tensor:
    """[r] -A ratio, and 0 for the rows `out` [r] bool, whose gradient is 0 too."""
    # Filled in before exp as well: a ratio that overflows would give 0 times infinity.
    ratio = log_ratio.masked_fill(out, 0).exp()
    return torch.where(out, torch.zeros_like(ratio), -advantages * ratio)
