"""What algorithms on the reward's own gradient share: samples before their kept steps, as rows, and
the loss of a differentiated reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from unirl.algorithms.anchored import Anchored
from unirl.algorithms.base import BASE, DifferentiableReward, Policy, RowLosses
from unirl.algorithms.joining import join_conditioning
from unirl.config.schema import AlgorithmConfig
from unirl.core.types import Conditioning, PromptRecord, SamplingParams, ScoredRollout
from unirl.models.base import DiffusionModel


@dataclass(frozen=True)
class KeptRows:
    """N samples, one row each, as they were before the K steps their rollouts kept."""

    latents: Tensor
    """[R, K, *latent] before each kept step, float32."""
    sigma: Tensor
    """[R, K] the levels of these steps, float32."""
    sample_index: Tensor
    """[R] int64."""
    records: tuple[PromptRecord, ...]
    """Of the N samples, not the rows."""
    conditioning: Conditioning
    """Of the N samples, not the rows."""
    negative_conditioning: Conditioning | None
    sampling: SamplingParams

    def __len__(self) -> int:
        return len(self.latents)

    def select(self, index: Tensor) -> Self:
        """The rows `index`; what belongs to samples is shared."""
        return replace(
            self,
            latents=self.latents[index],
            sigma=self.sigma[index],
            sample_index=self.sample_index[index],
        )

    @property
    def num_steps(self) -> int:
        """K."""
        return self.sigma.shape[1]

    @property
    def row_records(self) -> list[PromptRecord]:
        """R prompt records."""
        return [self.records[sample] for sample in self.sample_index.tolist()]


def kept_rows(scored: Sequence[ScoredRollout]) -> KeptRows:
    """This rank's samples; they count on through the window's rollouts, which kept equally many
    steps each."""
    latents = torch.cat([one.trajectory.kept_latents for one in scored])
    return KeptRows(
        latents=latents,
        sigma=torch.cat([_levels(one) for one in scored]).to(latents),
        sample_index=torch.arange(len(latents), device=latents.device),
        records=tuple(record for one in scored for record in one.request.sample_records),
        conditioning=join_conditioning([one.conditioning for one in scored]),
        negative_conditioning=join_conditioning([one.negative_conditioning for one in scored]),
        sampling=scored[0].request.sampling,
    )


def _levels(scored: ScoredRollout) -> Tensor:
    """[B, K] of one rollout, the same for all its samples."""
    request = scored.request
    return torch.tensor([[request.sigmas[step] for step in request.kept_steps]] * len(request))


def velocity_at(model: DiffusionModel, rows: KeptRows, latents: Tensor, number: int) -> Tensor:
    """[R, *latent] guided velocity at latents [R, *latent] before the kept step `number`."""
    negative = rows.negative_conditioning
    return model.guided_velocity(
        latents,
        rows.sigma[:, number],
        rows.conditioning.select(rows.sample_index),
        None if negative is None else negative.select(rows.sample_index),
        rows.sampling,
    )


@dataclass(frozen=True)
class AnchoredRows(Anchored):
    """Kept rows with what the base model says there."""

    kept: KeptRows
    base_velocity: Tensor | None
    """[R, K, *latent] float32; None where nothing is compared with it."""


class RewardObjective:
    """-reward, or max(0, reward_cap - reward), plus kl_coefficient mean (v - v_base)^2."""

    def __init__(self, config: AlgorithmConfig, reward: DifferentiableReward) -> None:
        self._cap = config.reward_cap
        self._coefficient = config.kl_coefficient
        self._reward = reward

    def anchored(self, policy: Policy, rows: KeptRows, slices: Sequence[Tensor]) -> AnchoredRows:
        """With the base velocity at the kept latents; costs nothing at coefficient 0."""
        if self._coefficient == 0:
            return AnchoredRows(rows, None)
        base = torch.zeros_like(rows.latents)
        with policy.using(BASE):
            for index in slices:
                part = rows.select(index)
                for number in range(rows.num_steps):
                    latents = part.latents[:, number]
                    base[index, number] = velocity_at(policy.model, part, latents, number)
        return AnchoredRows(rows, base)

    def losses(
        self, model: DiffusionModel, rows: AnchoredRows, clean: Tensor, velocity: Tensor
    ) -> RowLosses:
        """Of clean latents [R, *latent] and the velocities [R, K, *latent] that led there."""
        images = model.pixels(clean, rows.kept.sampling)
        reward = self._reward(images, rows.kept.row_records)
        loss = -reward if self._cap is None else (self._cap - reward).clamp(min=0)
        details = {"reward": reward, "saturated": _saturated(images)}
        if self._cap is not None:
            details["capped"] = (reward >= self._cap).float()
        if rows.base_velocity is not None:
            distance = ((velocity - rows.base_velocity) ** 2).flatten(1).mean(dim=1)
            details["velocity_deviation"] = distance
            loss = loss + self._coefficient * distance
        details["loss"] = loss
        return RowLosses(loss, {name: value.detach() for name, value in details.items()})


def reward_metrics(details: Mapping[str, Tensor]) -> dict[str, float]:
    """From the details that `RewardObjective.losses` gave."""
    names = {
        "loss": "loss",
        "reward": "reward_mean",
        "capped": "capped_fraction",
        "saturated": "saturated_fraction",
        "velocity_deviation": "velocity_deviation",
    }
    return {names[name]: float(value.mean()) for name, value in details.items()}


def _saturated(images: Tensor) -> Tensor:
    """[R] part of the pixel values at 0 or 1, where decoders clip and no gradient comes back."""
    at_end = (images <= 0) | (images >= 1)
    return at_end.float().flatten(1).mean(dim=1)
