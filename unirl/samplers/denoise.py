"""The denoising loop, for every model family: velocity in, recorded trajectory out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unirl.core.types import Trajectory
from unirl.samplers.kernels import Kernel, euler

Velocity = Callable[[Tensor, Tensor, int], Tensor]
"""(latents [B, *latent], sigma [B], step) -> velocity [B, *latent]."""


@torch.no_grad()
def sample_trajectory(
    velocity: Velocity,
    initial_latents: Tensor,
    sigmas: tuple[float, ...],
    kernel: Kernel,
    sde_steps: tuple[int, ...],
    step_noise: Callable[[int], Tensor],
) -> Trajectory:
    """Denoise [B, *latent] start noise through T+1 sigmas.

    Steps in `sde_steps` draw from the kernel with `step_noise(step)` [B, *latent] and are recorded;
    the others are Euler steps of the ODE.
    """
    latents = initial_latents.float()
    batch = len(latents)
    before, after, log_probs = [], [], []
    for step in range(len(sigmas) - 1):
        sigma = latents.new_full((batch,), sigmas[step])
        sigma_next = latents.new_full((batch,), sigmas[step + 1])
        v = velocity(latents, sigma, step)
        if step not in sde_steps:
            latents = euler(latents, v, sigma, sigma_next)
            continue
        gaussian = kernel.transition(latents, v, sigma, sigma_next)
        before.append(latents)
        latents = gaussian.sample(step_noise(step))
        after.append(latents)
        log_probs.append(gaussian.log_prob(latents))
    empty = latents.new_empty((batch, 0, *latents.shape[1:]))
    return Trajectory(
        latents=torch.stack(before, dim=1) if before else empty,
        next_latents=torch.stack(after, dim=1) if after else empty,
        log_probs=torch.stack(log_probs, dim=1) if log_probs else latents.new_empty((batch, 0)),
        final_latents=latents,
    )
