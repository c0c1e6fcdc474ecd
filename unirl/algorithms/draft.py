"""DRaFT-K (arXiv:2309.17400): the gradient of the reward through the last K denoising steps.

    loss = -r(decode(x_0)),   x_0 by x <- x + (s' - s) v(x, s) from x_{T-K} on, which is constant

or max(0, reward_cap - r); plus kl_coefficient times the mean over the K steps of (v - v_base)^2.
K = T is DRaFT, K = 1 is DRaFT-1. With random_last_steps K is drawn per rollout, as AlignProp
(arXiv:2310.03739) does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unirl.algorithms.base import Algorithm, DifferentiableReward, Policy, RowLosses
from unirl.algorithms.rewarded import (
    AnchoredRows,
    KeptRows,
    RewardObjective,
    kept_rows,
    reward_metrics,
    velocity_at,
)
from unirl.config.catalog import ALGORITHMS
from unirl.config.schema import AlgorithmConfig
from unirl.core.types import ScoredRollout
from unirl.models.base import DiffusionModel
from unirl.samplers.kernels import euler
from unirl.samplers.noise import seed_of


class DRaFT(Algorithm[KeptRows, AnchoredRows]):
    """Rows are samples before their last K steps; the loss makes these steps again."""

    capabilities = ALGORITHMS["draft"].capabilities

    def __init__(self, config: AlgorithmConfig, reward: DifferentiableReward) -> None:
        self._config = config
        self._objective = RewardObjective(config, reward)

    def kept_steps(self, num_inference_steps: int, rollout_id: int, seed: int) -> tuple[int, ...]:
        """The last K."""
        count = self._config.last_steps
        if self._config.random_last_steps:
            count = 1 + seed_of(f"{seed}/rollout-{rollout_id}/last-steps") % count
        return tuple(range(num_inference_steps - count, num_inference_steps))

    def rows(self, scored: Sequence[ScoredRollout]) -> KeptRows:
        return kept_rows(scored)

    def anchor(
        self, policy: Policy, rows: KeptRows, slices: Sequence[Tensor]
    ) -> tuple[AnchoredRows, Mapping[str, float]]:
        return self._objective.anchored(policy, rows, slices), {}

    def loss(self, policy: Policy, rows: AnchoredRows) -> RowLosses:
        clean, velocity = last_steps(policy.model, rows.kept)
        return self._objective.losses(policy.model, rows, clean, velocity)

    def metrics(self, details: Mapping[str, Tensor]) -> Mapping[str, float]:
        return reward_metrics(details)


def last_steps(model: DiffusionModel, rows: KeptRows) -> tuple[Tensor, Tensor]:
    """Clean latents [R, *latent] from the first kept ones on, and the velocities [R, K, *latent].

    The same Euler steps as in sampling; only the first of the kept latents are taken from there.
    """
    latents, velocities = rows.latents[:, 0], []
    sigma_next = torch.cat([rows.sigma[:, 1:], torch.zeros_like(rows.sigma[:, :1])], dim=1)
    for number in range(rows.num_steps):
        velocity = velocity_at(model, rows, latents, number)
        latents = euler(latents, velocity, rows.sigma[:, number], sigma_next[:, number])
        velocities.append(velocity)
    return latents, torch.stack(velocities, dim=1)
