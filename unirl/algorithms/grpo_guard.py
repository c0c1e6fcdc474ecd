"""GRPO-Guard (arXiv:2510.22319): ratios that are centred at 1 and equally wide at every step.

    b     = mean (mu - mu_old)^2 / (2 std^2)      what a plain log-ratio is below 0 on average
    ratio = exp((log_prob_new - log_prob_old + b) std)
          = exp(mean (mu - mu_old) z),  z = (x' - mu_old) / std
    loss  = max(-A ratio, -A clip(ratio, 1 - clip_range, 1 + clip_range_high)) / (-dt)
            + kl_coefficient KL

mu and std are those of the step, std in full (with sqrt(-dt)), for each sample by itself. The
second form of the ratio is the first one multiplied out: exactly 1 at equal means, and without the
rounding of two log-probs that nearly cancel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from unirl.algorithms.anchors import OldPolicyRows, replayed_velocities
from unirl.algorithms.base import Algorithm, DifferentiableReward, Policy, RowLosses, ShadowRule
from unirl.algorithms.reference import ReferencePenalty, loss_metrics
from unirl.algorithms.surrogate import ClipRange, ratio_metrics
from unirl.algorithms.transitions import (
    TransitionRows,
    transition_of,
    transition_rows,
    velocity_of,
)
from unirl.config.catalog import ALGORITHMS
from unirl.config.schema import AlgorithmConfig
from unirl.core.types import ScoredRollout
from unirl.samplers.gaussian import Gaussian


class GRPOGuard(Algorithm[TransitionRows, OldPolicyRows]):
    """Rows are transitions; the anchor is the old policy's velocity, replayed."""

    capabilities = ALGORITHMS["grpo_guard"].capabilities

    def __init__(self, config: AlgorithmConfig, reward: DifferentiableReward) -> None:
        self._config = config
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
        transitions = rows.transitions
        reference = self._penalty.reference(policy, transitions)
        velocity = velocity_of(policy.model, transitions)
        new = transition_of(transitions, velocity)
        log_ratio = normalised_log_ratio(new, rows.old, transitions.next_latents)
        ratio = log_ratio.exp()
        clip = ClipRange.of(self._config, policy.progress)
        policy_loss = clip.loss(transitions.advantages, ratio)
        if self._config.loss_per_time:
            policy_loss = policy_loss / transitions.time_step
        details = {"log_ratio": log_ratio, **clip.details(ratio)}
        return self._penalty.added_to(policy_loss, details, transitions, velocity, reference)

    def metrics(self, details: Mapping[str, Tensor]) -> Mapping[str, float]:
        return loss_metrics(details) | ratio_metrics(details)


def normalised_log_ratio(new: Gaussian, old: Gaussian, value: Tensor) -> Tensor:
    """[r] mean (mu_new - mu_old)(x' - mu_old) / std for x' = value [r, *latent], float32.

    Both have the same std: that of their step.
    """
    noise = (value - old.mean) / old.std
    return ((new.mean - old.mean) * noise).flatten(1).mean(dim=1)
