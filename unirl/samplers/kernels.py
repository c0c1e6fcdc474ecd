"""From a velocity to the Gaussian of the next latents, one function per published kernel.

Notation of the papers: x latents at sigma s, v velocity, s' the next sigma, dt = s' - s < 0.
All in float32. std here is the full standard deviation of the step (some code bases mean the
diffusion coefficient without sqrt(-dt)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.samplers.gaussian import Gaussian


def euler(latents: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """The ODE step x + v dt, for latents [B, *latent] and sigmas [B]."""
    return latents + _per_sample(sigma_next - sigma, latents) * velocity


@dataclass(frozen=True)
class Kernel:
    """A transition kernel at one noise level, on one schedule."""

    name: str
    eta: float
    sigma_max: float
    """Stands in for sigma in 1 / (1 - sigma) where sigma = 1: the schedule's second sigma."""

    def transition(
        self, latents: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor
    ) -> Gaussian:
        """The Gaussian of x' for latents and velocity [B, *latent] and sigmas [B]."""
        if latents.shape != velocity.shape or sigma.shape != (len(latents),):
            raise ValueError(
                f"latents {tuple(latents.shape)}, velocity {tuple(velocity.shape)}, "
                f"sigma {tuple(sigma.shape)} do not fit"
            )
        s, s_next = _per_sample(sigma, latents), _per_sample(sigma_next, latents)
        return _TRANSITIONS[self.name](latents, velocity, s, s_next, self)


def make_kernel(name: str, eta: float, sigmas: tuple[float, ...]) -> Kernel:
    """The kernel `name` for the schedule `sigmas` (T+1 values from 1 to 0)."""
    return Kernel(name, eta, sigma_max=sigmas[1])


def _flow(x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, kernel: Kernel) -> Gaussian:
    """Flow-GRPO's reverse-time SDE (arXiv:2505.05470): diffusion eta sqrt(s / (1 - s))."""
    s_safe = torch.where(s == 1, torch.full_like(s, kernel.sigma_max), s)
    return _reverse_sde(x, v, s, s_next, kernel.eta * (s / (1 - s_safe)).sqrt())


def _dance(x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, kernel: Kernel) -> Gaussian:
    """DanceGRPO's SDE (arXiv:2505.07818): the same drift with constant diffusion eta."""
    return _reverse_sde(x, v, s, s_next, torch.full_like(s, kernel.eta))


def _reverse_sde(x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, diffusion: Tensor) -> Gaussian:
    dt = s_next - s
    mean = x * (1 + diffusion**2 / (2 * s) * dt) + v * (1 + diffusion**2 * (1 - s) / (2 * s)) * dt
    return Gaussian(mean, diffusion * (-dt).sqrt())


def _cps(x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, kernel: Kernel) -> Gaussian:
    """Coefficients-preserving sampling: noise replaces a part of the predicted noise.

    The log-prob is the true Gaussian one; public ports use -(x' - mean)^2, without 1 / (2 std^2)
    and constants, so their clip ranges are in another unit.
    """
    std = s_next * math.sin(kernel.eta * math.pi / 2)
    clean = x - s * v
    noise = x + (1 - s) * v
    return Gaussian((1 - s_next) * clean + (s_next**2 - std**2).sqrt() * noise, std)


_TRANSITIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Kernel], Gaussian]] = {
    "flow": _flow,
    "dance": _dance,
    "cps": _cps,
}


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))
