"""DiffusionNFT (arXiv:2509.16117): a better policy from the forward process, without log-probs.

    v+- = v_old +- beta (v - v_old)          implicit positive and negative policy
    x0+- = x_t - t v+-                       their predictions of the clean sample x0
    L+- = mean (x0+- - x0)^2 / w+-           w+- = mean |x0+- - x0|, a constant
    r = (clip(A / A_max, -1, 1) + 1) / 2     probability that the sample is a good one
    loss = A_max (r L+ + (1 - r) L-) / beta + kl_coefficient mean (v - v_ref)^2

v_old is a shadow of the trained weights that follows them, and rollouts and evaluations sample
with it: old <- d old + (1 - d) trained, d = min(rate max(0, step - start), max).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from unirl.algorithms.anchored import Anchored
from unirl.algorithms.base import (
    Algorithm,
    DifferentiableReward,
    Policy,
    RowLosses,
    ShadowRule,
)
from unirl.algorithms.renoised import (
    BasePenalty,
    RenoisedRows,
    all_renoised,
    mean_square,
    per_row,
    velocities_in,
    velocity_of,
)
from unirl.config.catalog import ALGORITHMS
from unirl.config.schema import AlgorithmConfig
from unirl.core.errors import TrainingError
from unirl.core.types import ScoredRollout

OLD = "old"
"""The shadow that samples."""

SMALLEST_WEIGHT = 1e-5
"""Of w: a prediction that is exact would divide by 0."""


@dataclass(frozen=True)
class NFTRows(Anchored):
    """Renoised samples with the velocities that are fixed meanwhile."""

    renoised: RenoisedRows
    old_velocity: Tensor
    """[R, *latent] float32."""
    reference_velocity: Tensor | None
    """[R, *latent] float32; None at kl_coefficient 0."""


class DiffusionNFT(Algorithm[RenoisedRows, NFTRows]):
    """Rows are renoised samples; the anchor asks the old policy, and the reference if there is one,
    about all of them."""

    capabilities = ALGORITHMS["diffusion_nft"].capabilities

    def __init__(self, config: AlgorithmConfig, reward: DifferentiableReward) -> None:
        self._config = config
        self._penalty = BasePenalty(config)

    def shadows(self) -> Mapping[str, ShadowRule]:
        return {OLD: ShadowRule(self._decay)}

    def sampling_weights(self) -> str | None:
        return OLD

    def _decay(self, num_steps: int) -> float:
        config = self._config
        rise = config.old_decay_rate * max(0, num_steps - config.old_decay_start)
        return min(rise, config.old_decay_max)

    def rows(self, scored: Sequence[ScoredRollout]) -> RenoisedRows:
        return all_renoised(self._config, scored)

    def anchor(
        self, policy: Policy, rows: RenoisedRows, slices: Sequence[Tensor]
    ) -> tuple[NFTRows, Mapping[str, float]]:
        with policy.using(OLD):
            old = velocities_in(policy.model, rows, slices)
        return NFTRows(rows, old, self._penalty.reference(policy, rows, slices)), {}

    def loss(self, policy: Policy, rows: NFTRows) -> RowLosses:
        """Raises TrainingError when it is not finite."""
        velocity, old = velocity_of(policy.model, rows.renoised), rows.old_velocity
        towards = self._config.mix_beta * (velocity - old)
        positive = self._error(rows.renoised, old + towards)
        negative = self._error(rows.renoised, old - towards)
        good = self._probability_of_good(rows.renoised.advantages)
        mixed = good * positive + (1 - good) * negative
        policy_loss = self._config.adv_clip_max * mixed / self._config.mix_beta
        details = {
            "positive_loss": positive,
            "negative_loss": negative,
            "old_deviation": mean_square(velocity - old),
        }
        losses = self._penalty.added_to(policy_loss, details, velocity, rows.reference_velocity)
        _require_finite(losses.loss, rows)
        return losses

    def _error(self, rows: RenoisedRows, velocity: Tensor) -> Tensor:
        """[R] L+ or L- of a policy's velocity. Weighed in float64, as the authors do: the errors
        of good predictions are small."""
        predicted = rows.noisy - per_row(rows.time, velocity) * velocity
        error = predicted - rows.clean
        if not self._config.adaptive_weight:
            return mean_square(error)
        weight = error.detach().double().abs().flatten(1).mean(dim=1).clamp_min(SMALLEST_WEIGHT)
        return (mean_square(error) / weight).to(error.dtype)

    def _probability_of_good(self, advantages: Tensor) -> Tensor:
        """[R] r, in [0, 1]."""
        return ((advantages / self._config.adv_clip_max).clamp(-1, 1) + 1) / 2

    def metrics(self, details: Mapping[str, Tensor]) -> Mapping[str, float]:
        return {name: float(value.mean()) for name, value in details.items()}


def _require_finite(loss: Tensor, rows: NFTRows) -> None:
    wrong = ~loss.detach().isfinite()
    if wrong.any():
        bad = int(wrong.nonzero()[0])
        raise TrainingError(
            f"diffusion_nft: the loss of sample {int(rows.sample_index[bad])} at noise level "
            f"{float(rows.renoised.time[bad]):.4g} is {float(loss.detach()[bad])}. Lower "
            "stack.optimizer.learning_rate, or set model.precision=fp32 or bf16."
        )
