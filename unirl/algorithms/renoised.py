"""Clean samples, noised again: what the forward-process algorithms train on.

    x_t = (1 - t) x0 + t noise,    target velocity = noise - x0

In go scored rollouts, of which only the clean ends of the samples are used; how they were sampled
does not matter. Out come rows (sample, noise, level t) and the network's velocity for them: the
conditional one, as in pretraining, whatever guidance the samples were drawn with. Noise and levels
depend on the sample's noise key alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from unirl.algorithms.base import BASE, Policy, RowLosses
from unirl.algorithms.joining import join_conditioning
from unirl.config.schema import AlgorithmConfig
from unirl.core.types import Conditioning, ScoredRollout
from unirl.models.base import DiffusionModel
from unirl.samplers.noise import keyed_noise


@dataclass(frozen=True)
class CleanSamples:
    """This rank's N samples of one window."""

    latents: Tensor
    """[N, *latent] x0, float32."""
    advantages: Tensor
    """[N] float32."""
    conditioning: Conditioning


@dataclass(frozen=True)
class RenoisedRows:
    """R rows, each one of N samples at one noise level."""

    samples: CleanSamples
    """All N, whichever rows were selected."""
    sample_index: Tensor
    """[R] int64."""
    time: Tensor
    """[R] t in (0, 1], float32."""
    noise: Tensor
    """[R, *latent] float32."""

    def __len__(self) -> int:
        return len(self.time)

    def select(self, index: Tensor) -> Self:
        return replace(
            self,
            sample_index=self.sample_index[index],
            time=self.time[index],
            noise=self.noise[index],
        )

    @property
    def clean(self) -> Tensor:
        """[R, *latent] x0."""
        return self.samples.latents[self.sample_index]

    @property
    def noisy(self) -> Tensor:
        """[R, *latent] x_t."""
        t = per_row(self.time, self.noise)
        return (1 - t) * self.clean + t * self.noise

    @property
    def target(self) -> Tensor:
        """[R, *latent] the velocity that leads from x_t to x0."""
        return self.noise - self.clean

    @property
    def advantages(self) -> Tensor:
        """[R] float32."""
        return self.samples.advantages[self.sample_index]


def clean_samples(scored: Sequence[ScoredRollout]) -> CleanSamples:
    """Of all rollouts of a window, one after the other."""
    device = scored[0].trajectory.final_latents.device
    return CleanSamples(
        latents=torch.cat([one.trajectory.final_latents for one in scored]),
        advantages=torch.cat([one.advantages[one.places] for one in scored]).to(device),
        conditioning=join_conditioning([one.conditioning for one in scored]),
    )


def all_renoised(config: AlgorithmConfig, scored: Sequence[ScoredRollout]) -> RenoisedRows:
    """R = N samples x K levels, in the order (level number, sample)."""
    return renoised(config, scored, range(sum(len(one) for one in scored)))


def renoised(
    config: AlgorithmConfig, scored: Sequence[ScoredRollout], chosen: Sequence[int]
) -> RenoisedRows:
    """Rows of the n samples `chosen`, each at K = timesteps_per_sample levels.

    R = n x K, in the order (level number, sample).
    """
    samples = clean_samples(scored)
    device, count = samples.latents.device, config.timesteps_per_sample
    keys = [key for one in scored for key in one.request.step_noise_keys]
    schedules = [one.request.sigmas for one in scored for _ in range(len(one))]
    levels = [
        noise_levels(config.timestep_choice, count, schedules[sample], keys[sample])
        for sample in chosen
    ]
    noise_keys = [f"{keys[sample]}/renoise-{k}" for k in range(count) for sample in chosen]
    return RenoisedRows(
        samples,
        sample_index=torch.tensor(chosen, device=device).repeat(count),
        time=torch.tensor(levels, dtype=torch.float32, device=device).T.flatten(),
        noise=keyed_noise(noise_keys, tuple(samples.latents.shape[1:])).to(device),
    )


def noise_levels(choice: str, count: int, sigmas: Sequence[float], key: str) -> list[float]:
    """`count` levels in (0, 1] for the sample of noise key `key`.

    schedule: of `sigmas`, none a second time before each was drawn once; random: uniform.
    """
    draw = random.Random(f"{key}/levels")
    if choice == "random":
        return [1 - draw.random() for _ in range(count)]
    candidates = [sigma for sigma in sigmas if sigma > 0]
    rounds, rest = divmod(count, len(candidates))
    return candidates * rounds + draw.sample(candidates, rest)


def velocity_of(model: DiffusionModel, rows: RenoisedRows) -> Tensor:
    """[R, *latent] velocity under the network's present weights, without guidance."""
    conditioning = rows.samples.conditioning.select(rows.sample_index)
    return model.velocity(rows.noisy, rows.time, conditioning)


def velocities_in(model: DiffusionModel, rows: RenoisedRows, slices: Sequence[Tensor]) -> Tensor:
    """[R, *latent] the same, computed in `slices`; 0 in rows of none."""
    found = torch.zeros_like(rows.noise)
    for index in slices:
        found[index] = velocity_of(model, rows.select(index))
    return found


class BasePenalty:
    """kl_coefficient times the squared distance to the velocity without adapter; costs no forward
    at 0."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._coefficient = config.kl_coefficient

    def reference(
        self, policy: Policy, rows: RenoisedRows, slices: Sequence[Tensor]
    ) -> Tensor | None:
        """[R, *latent] the base's velocity, computed in `slices`; None at coefficient 0."""
        if self._coefficient == 0:
            return None
        with policy.using(BASE):
            return velocities_in(policy.model, rows, slices)

    def added_to(
        self,
        policy_loss: Tensor,
        details: Mapping[str, Tensor],
        velocity: Tensor,
        reference: Tensor | None,
    ) -> RowLosses:
        """policy_loss [r] plus the weighted distance of velocity [r, *latent] from the reference,
        with both among the details."""
        loss, parts = policy_loss, {**details, "policy_loss": policy_loss}
        if reference is not None:
            parts["velocity_deviation"] = mean_square(velocity - reference)
            loss = loss + self._coefficient * parts["velocity_deviation"]
        parts["loss"] = loss
        return RowLosses(loss, {name: value.detach() for name, value in parts.items()})


def mean_square(difference: Tensor) -> Tensor:
    """[R] mean over latent elements of the square, for [R, *latent]."""
    return (difference**2).flatten(1).mean(dim=1)


def velocity_error(model: DiffusionModel, rows: RenoisedRows) -> Tensor:
    """[R] mean_square(v - target): what the model was pretrained on."""
    return mean_square(velocity_of(model, rows) - rows.target)


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """[R, 1, ...] values [R] with the dimensions of `like`."""
    return values.view(-1, *[1] * (like.ndim - 1))
