"""The denoising loop, for every model family: velocity in, recorded trajectory out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unirl.core.types import Trajectory
from unirl.samplers.kernels import Kernel
from unirl.samplers.solvers import Solver

Velocity = Callable[[Tensor, Tensor, int], Tensor]
"""(latents [B, *latent], sigma [B], step) -> velocity [B, *latent]."""


@torch.no_grad()
def sample_trajectory(
    velocity: Velocity,
    initial_latents: Tensor,
    sigmas: Sequence[float],
    kernel: Kernel,
    solver: Solver,
    sde_steps: Sequence[Sequence[int]],
    step_noise: Callable[[int], Tensor],
    kept_steps: Sequence[int] = (),
) -> Trajectory:
    """Denoise [B, *latent] start latents through T+1 sigmas.

    Each sample draws its own `sde_steps` [B, S] from the kernel with `step_noise(step)`
    [B, *latent], and they are recorded; its other steps are the solver's. A sample that took a
    stochastic step starts the solver's history anew.
    """
    latents = initial_latents.float()
    del initial_latents  # its memory is free for what comes
    record = _Record(latents, sde_steps)

    def advance(latents: Tensor, step: int, restarted: Tensor) -> Tensor:
        """One step of all samples; a function, so that what it made is freed with it."""
        sigma = latents.new_full((len(latents),), sigmas[step])
        v = velocity(latents, sigma, step)
        stochastic = record.is_sde(step)
        if not stochastic.any():
            return solver.step(latents, v, step, restarted)
        sigma_next = latents.new_full((len(latents),), sigmas[step + 1])
        gaussian = kernel.transition(latents, v, sigma, sigma_next)
        drawn = gaussian.sample(step_noise(step))
        record.write(step, latents, drawn, gaussian.log_prob(drawn))
        if stochastic.all():
            return drawn
        return _chosen(stochastic, drawn, solver.step(latents, v, step, restarted))

    restarted = torch.ones(len(latents), dtype=torch.bool)
    kept = []
    for step in range(len(sigmas) - 1):
        if step in kept_steps:
            kept.append(latents)
        latents = advance(latents, step, restarted.to(latents.device))
        restarted = record.is_sde(step)
    return record.trajectory(kept, latents)


class _Record:
    """The stochastic steps of B samples, as they are made."""

    def __init__(self, like: Tensor, sde_steps: Sequence[Sequence[int]]) -> None:
        # On the CPU, so that asking which samples are stochastic never waits for a GPU.
        self._steps = torch.tensor([list(steps) for steps in sde_steps], dtype=torch.int64)
        batch, num_steps = self._steps.shape
        shape = (batch, num_steps, *like.shape[1:])
        self._before = like.new_empty(shape)
        self._after = like.new_empty(shape)
        self._log_probs = like.new_empty((batch, num_steps))

    def is_sde(self, step: int) -> Tensor:
        """[B] bool: whose step this is."""
        return (self._steps == step).any(dim=1)

    def write(self, step: int, before: Tensor, after: Tensor, log_prob: Tensor) -> None:
        """The step of the samples whose step it is, out of those of all B."""
        for slot in range(self._steps.shape[1]):
            samples = torch.nonzero(self._steps[:, slot] == step).flatten()
            if len(samples) == len(self._steps):  # no copy of what is taken whole
                self._before[:, slot], self._after[:, slot] = before, after
                self._log_probs[:, slot] = log_prob
            elif len(samples):
                rows = samples.to(before.device)
                self._before[rows, slot], self._after[rows, slot] = before[rows], after[rows]
                self._log_probs[rows, slot] = log_prob[rows]

    def trajectory(self, kept: Sequence[Tensor], final_latents: Tensor) -> Trajectory:
        empty = final_latents.new_empty((len(final_latents), 0, *final_latents.shape[1:]))
        return Trajectory(
            latents=self._before,
            next_latents=self._after,
            log_probs=self._log_probs,
            steps=self._steps.to(final_latents.device),
            kept_latents=torch.stack(list(kept), dim=1) if kept else empty,
            final_latents=final_latents,
        )


def _chosen(rows: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """[B, *latent] of `yes` where rows [B] bool, else of `no`."""
    return torch.where(rows.to(yes.device).view(-1, *[1] * (yes.ndim - 1)), yes, no)
