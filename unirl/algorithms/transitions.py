"""Recorded stochastic steps as rows: what every algorithm on a rollout's own path trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from unirl.algorithms.base import Policy
from unirl.algorithms.joining import join_conditioning
from unirl.core.types import Conditioning, SamplingParams, ScoredRollout
from unirl.models.base import DiffusionModel
from unirl.samplers.distinct import distinct, distinct_ids
from unirl.samplers.gaussian import Gaussian
from unirl.samplers.kernels import Kernel, make_kernel


@dataclass(frozen=True)
class TransitionRows:
    """R transitions of N samples, in the order (recorded step, sample), as sampling made them."""

    latents: Tensor
    """[R, *latent] float32."""
    next_latents: Tensor
    """[R, *latent] float32."""
    sigma: Tensor
    """[R] float32."""
    sigma_next: Tensor
    """[R] float32."""
    step: Tensor
    """[R] int64: which step of its schedule."""
    rollout_log_prob: Tensor
    """[R] the engine's own log-prob, float32."""
    advantages: Tensor
    """[R] float32."""
    sample_index: Tensor
    """[R] int64."""
    state: Tensor
    """[R] int64; rows of equal states have equal latents, sigma and conditioning."""
    conditioning: Conditioning
    """Of the N samples, not the rows."""
    negative_conditioning: Conditioning | None
    sampling: SamplingParams
    kernel: Kernel

    def __len__(self) -> int:
        return len(self.latents)

    def select(self, index: Tensor) -> Self:
        """The rows `index`; the conditioning is shared."""
        return replace(self, **{name: getattr(self, name)[index] for name in PER_ROW})

    @property
    def time_step(self) -> Tensor:
        """[R] -dt = sigma - sigma_next, above 0."""
        return self.sigma - self.sigma_next


PER_ROW = (
    "latents",
    "next_latents",
    "sigma",
    "sigma_next",
    "step",
    "rollout_log_prob",
    "advantages",
    "sample_index",
    "state",
)


def transition_rows(scored: Sequence[ScoredRollout]) -> TransitionRows:
    """Recorded steps of this rank's samples; samples count on through the window's rollouts.

    A row keeps its rollout's kernel, so all rollouts of a window must have the same.
    """
    parts, num_samples, num_rows = [], 0, 0
    for one in scored:
        part = _of_rollout(one)
        index = part.sample_index + num_samples
        parts.append(replace(part, sample_index=index, state=part.state + num_rows))
        num_samples += len(one)
        num_rows += len(part)
    first = parts[0]
    if len(parts) == 1:
        return first
    return replace(
        first,
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in PER_ROW},
        conditioning=join_conditioning([part.conditioning for part in parts]),
        negative_conditioning=join_conditioning([part.negative_conditioning for part in parts]),
    )


def velocity_of(model: DiffusionModel, rows: TransitionRows) -> Tensor:
    """[R, *latent] guided velocity under the network's present weights, each state asked once."""
    negative = rows.negative_conditioning
    states = distinct_ids(rows.state)
    samples = rows.sample_index[states.first]
    return model.guided_velocity(
        rows.latents[states.first],
        rows.sigma[states.first],
        rows.conditioning.select(samples),
        None if negative is None else negative.select(samples),
        rows.sampling,
    )[states.kind]


def transition_of(rows: TransitionRows, velocity: Tensor) -> Gaussian:
    """The distribution of the next latents for velocity [R, *latent]."""
    return rows.kernel.transition(rows.latents, velocity, rows.sigma, rows.sigma_next)


def unit_step(rows: TransitionRows) -> Gaussian:
    """[R, 1] the step from latents 0 at velocity 1.

    Means are linear in the velocity, so its mean is their derivative; its std is the step's.
    """
    velocity = torch.ones_like(rows.sigma)[:, None]
    return rows.kernel.transition(0 * velocity, velocity, rows.sigma, rows.sigma_next)


def policy_of(policy: Policy, rows: TransitionRows) -> Gaussian:
    """The distribution of the next latents under the present weights."""
    return transition_of(rows, velocity_of(policy.model, rows))


def _of_rollout(scored: ScoredRollout) -> TransitionRows:
    """[B, S, ...] trajectory of one rollout as rows in the order (recorded step, sample)."""
    request, trajectory = scored.request, scored.trajectory
    num_samples, num_steps = trajectory.log_probs.shape
    device = trajectory.latents.device
    sigmas = torch.tensor(request.sigmas, dtype=torch.float32, device=device)
    steps = trajectory.steps.T.reshape(-1)
    return TransitionRows(
        latents=trajectory.latents.transpose(0, 1).flatten(0, 1),
        next_latents=trajectory.next_latents.transpose(0, 1).flatten(0, 1),
        sigma=sigmas[steps],
        sigma_next=sigmas[steps + 1],
        step=steps,
        rollout_log_prob=trajectory.log_probs.T.reshape(-1),
        advantages=scored.advantages[scored.places].to(device).repeat(num_steps),
        sample_index=torch.arange(num_samples, device=device).repeat(num_steps),
        state=_states(scored).to(device),
        conditioning=scored.conditioning,
        negative_conditioning=scored.negative_conditioning,
        sampling=request.sampling,
        kernel=make_kernel(request.sampling.kernel, request.sampling.eta, request.sigmas),
    )


def _states(scored: ScoredRollout) -> Tensor:
    """[S * B] int64: before its first stochastic step, a sample is still where its start led."""
    request = scored.request
    num_samples = len(request)
    states = torch.arange(num_samples * request.num_sde_steps)
    if request.num_sde_steps:
        first_steps = (steps[0] for steps in request.sde_steps)
        starts = distinct(list(zip(request.start_names, first_steps, strict=True)))
        states[:num_samples] = starts.first[starts.kind]
    return states
