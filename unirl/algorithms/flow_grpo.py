"""Flow-GRPO (arXiv:2505.05470): clipped policy gradient on the log-probs of SDE steps.

    ratio = exp(log_prob_new - log_prob_old)
    loss  = mean over samples and recorded steps of
            max(-A ratio, -A clip(ratio, 1 - clip_range, 1 + clip_range_high)) + kl_coefficient KL

Log-probs are means over latent elements. Flow-GRPO-Fast is the same loss on a window of steps,
DanceGRPO (arXiv:2505.07818) with the dance kernel, MixGRPO (arXiv:2507.21802) with a window that
moves, DDPO (arXiv:2305.13301) with the ddim kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from unirl.algorithms.anchors import RatioRows, replayed_log_probs, rollout_log_probs
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


class FlowGRPO(Algorithm[TransitionRows, RatioRows]):
    """Rows are transitions; the anchor is the engine's log-prob or a replay before the update."""

    capabilities = ALGORITHMS["flow_grpo"].capabilities

    def __init__(self, config: AlgorithmConfig, reward: DifferentiableReward) -> None:
        self._config = config
        self._penalty = ReferencePenalty(config)

    def shadows(self) -> Mapping[str, ShadowRule]:
        return self._penalty.shadows()

    def rows(self, scored: Sequence[ScoredRollout]) -> TransitionRows:
        return transition_rows(scored)

    def anchor(
        self, policy: Policy, rows: TransitionRows, slices: Sequence[Tensor]
    ) -> tuple[RatioRows, Mapping[str, float]]:
        if self._config.old_log_prob == "rollout":
            return rollout_log_probs(rows)
        return replayed_log_probs(policy, rows, slices)

    def loss(self, policy: Policy, rows: RatioRows) -> RowLosses:
        transitions = rows.transitions
        reference = self._penalty.reference(policy, transitions)
        velocity = velocity_of(policy.model, transitions)
        log_prob = transition_of(transitions, velocity).log_prob(transitions.next_latents)
        log_ratio = log_prob - rows.old_log_prob
        ratio = log_ratio.exp()
        clip = ClipRange.of(self._config, policy.progress)
        policy_loss = clip.loss(transitions.advantages, ratio)
        details = {"log_ratio": log_ratio, **clip.details(ratio)}
        return self._penalty.added_to(policy_loss, details, transitions, velocity, reference)

    def metrics(self, details: Mapping[str, Tensor]) -> Mapping[str, float]:
        return loss_metrics(details) | ratio_metrics(details)
