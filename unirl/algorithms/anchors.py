"""What is kept of the old policy before a window's first update: its log-probs or its velocities.

Replays run in the very slices of the update, so that the first ratio is exactly 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.algorithms.anchored import Anchored
from unirl.algorithms.base import Policy
from unirl.algorithms.transitions import TransitionRows, policy_of, transition_of, velocity_of
from unirl.samplers.gaussian import Gaussian


@dataclass(frozen=True)
class RatioRows(Anchored):
    """Transitions with the log-probs their ratios are taken to."""

    transitions: TransitionRows
    old_log_prob: Tensor
    """[R] float32."""


@dataclass(frozen=True)
class OldPolicyRows(Anchored):
    """Transitions with the old policy's whole distribution, for losses that need its mean."""

    transitions: TransitionRows
    old_velocity: Tensor
    """[R, *latent] guided, float32."""

    @property
    def old(self) -> Gaussian:
        """The old policy's distribution of the next latents."""
        return transition_of(self.transitions, self.old_velocity)


def rollout_log_probs(rows: TransitionRows) -> tuple[RatioRows, Mapping[str, float]]:
    """The engine's own log-probs: no forward, exact where it samples as training computes."""
    return RatioRows(rows, rows.rollout_log_prob), {}


@torch.no_grad()
def replayed_log_probs(
    policy: Policy, rows: TransitionRows, slices: Sequence[Tensor]
) -> tuple[RatioRows, Mapping[str, float]]:
    """Log-probs under the present weights, and how far the engine's are from them."""
    old_log_prob = rows.rollout_log_prob.clone()
    for index in slices:
        part = rows.select(index)
        old_log_prob[index] = policy_of(policy, part).log_prob(part.next_latents)
    return RatioRows(rows, old_log_prob), _difference(rows, old_log_prob, slices)


@torch.no_grad()
def replayed_velocities(
    policy: Policy, rows: TransitionRows, slices: Sequence[Tensor]
) -> tuple[OldPolicyRows, Mapping[str, float]]:
    """Velocities under the present weights, and how far the engine's log-probs are from theirs."""
    velocity = torch.zeros_like(rows.latents)
    old_log_prob = rows.rollout_log_prob.clone()
    for index in slices:
        part = rows.select(index)
        velocity[index] = velocity_of(policy.model, part)
        old_log_prob[index] = transition_of(part, velocity[index]).log_prob(part.next_latents)
    return OldPolicyRows(rows, velocity), _difference(rows, old_log_prob, slices)


def _difference(
    rows: TransitionRows, old_log_prob: Tensor, slices: Sequence[Tensor]
) -> Mapping[str, float]:
    """Of the rows that are trained."""
    difference = (old_log_prob - rows.rollout_log_prob)[torch.cat(list(slices))].abs()
    return {
        "rollout_replay_log_prob_diff_mean": float(difference.mean()),
        "rollout_replay_log_prob_diff_max": float(difference.max()),
    }
