"""ReFL (arXiv:2304.05977): the gradient of the reward of one step's clean prediction.

    loss = -r(decode(x - s v(x, s))),   x constant, at one late step per rollout

or max(0, reward_cap - r); plus kl_coefficient (v - v_base)^2. Sampling after that step is only for
the reward that is shown.
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


class ReFL(Algorithm[KeptRows, AnchoredRows]):
    """Rows are samples before one step, which the loss takes right to the end."""

    capabilities = ALGORITHMS["refl"].capabilities

    def __init__(self, config: AlgorithmConfig, reward: DifferentiableReward) -> None:
        self._config = config
        self._objective = RewardObjective(config, reward)

    def kept_steps(self, num_inference_steps: int, rollout_id: int, seed: int) -> tuple[int, ...]:
        """One of start_range."""
        steps = self._config.start_steps(num_inference_steps)
        return (steps[seed_of(f"{seed}/rollout-{rollout_id}/start") % len(steps)],)

    def rows(self, scored: Sequence[ScoredRollout]) -> KeptRows:
        return kept_rows(scored)

    def anchor(
        self, policy: Policy, rows: KeptRows, slices: Sequence[Tensor]
    ) -> tuple[AnchoredRows, Mapping[str, float]]:
        return self._objective.anchored(policy, rows, slices), {}

    def loss(self, policy: Policy, rows: AnchoredRows) -> RowLosses:
        clean, velocity = clean_prediction(policy.model, rows.kept)
        return self._objective.losses(policy.model, rows, clean, velocity[:, None])

    def metrics(self, details: Mapping[str, Tensor]) -> Mapping[str, float]:
        return reward_metrics(details)


def clean_prediction(model: DiffusionModel, rows: KeptRows) -> tuple[Tensor, Tensor]:
    """x - s v and v, [R, *latent], for the one kept step of the rows."""
    latents, sigma = rows.latents[:, 0], rows.sigma[:, 0]
    velocity = velocity_at(model, rows, latents, 0)
    return euler(latents, velocity, sigma, torch.zeros_like(sigma)), velocity
