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

NEARLY_ONE = 0.999
"""Flow schedules of DPM-Solver begin a little below 1, at 0.9997 with a shift of 3; a first step
from there would be ten times as noisy as one from 1."""


def euler(latents: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """The ODE step x + v dt, for latents [B, *latent] and sigmas [B]."""
    return latents + _per_sample(sigma_next - sigma, latents) * velocity


@dataclass(frozen=True)
class Kernel:
    """A transition kernel at one noise level, on one schedule."""

    name: str
    eta: float
    sigmas: tuple[float, ...]
    """The schedule: T+1 levels from the largest to 0."""

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
    """The kernel `name` for the schedule `sigmas` (T+1 levels from the largest to 0)."""
    return Kernel(name, eta, sigmas)


def _flow(x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, kernel: Kernel) -> Gaussian:
    """Flow-GRPO's reverse-time SDE (arXiv:2505.05470): diffusion eta sqrt(s / (1 - s)).

    Where the first level is nearly 1 the second one stands in for it in 1 - s.
    """
    second = kernel.sigmas[1]
    s_safe = torch.where(s > max(NEARLY_ONE, second), torch.full_like(s, second), s)
    return _reverse_sde(x, v, s, s_next, kernel.eta * (s / (1 - s_safe)).sqrt())


def _dance(x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, kernel: Kernel) -> Gaussian:
    """DanceGRPO's SDE (arXiv:2505.07818): the same drift with constant diffusion eta."""
    return _reverse_sde(x, v, s, s_next, torch.full_like(s, kernel.eta))


def _flash(x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, kernel: Kernel) -> Gaussian:
    """FlashGRPO's SDE: the same drift with diffusion eta (s_min + (s_max - s_min) s).

    Our reading: s_min and s_max are the schedule's smallest level above 0 and its largest.
    """
    largest, smallest = max(kernel.sigmas), min(level for level in kernel.sigmas if level > 0)
    return _reverse_sde(x, v, s, s_next, kernel.eta * (smallest + (largest - smallest) * s))


def _reverse_sde(x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, diffusion: Tensor) -> Gaussian:
    dt = s_next - s
    mean = x * (1 + diffusion**2 / (2 * s) * dt) + v * (1 + diffusion**2 * (1 - s) / (2 * s)) * dt
    return Gaussian(mean, diffusion * (-dt).sqrt())


def _cps(x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, kernel: Kernel) -> Gaussian:
    """Coefficients-preserving sampling: noise replaces a part of the predicted noise.

    The log-prob is the true Gaussian one; public ports use -(x' - mean)^2, without 1 / (2 std^2)
    and constants, so their clip ranges are in another unit.
    """
    return _renoise(x, v, s, s_next, s_next * math.sin(kernel.eta * math.pi / 2))


def _ddim(x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, kernel: Kernel) -> Gaussian:
    """DDIM with eta (arXiv:2010.02502, eq. 12 and 16), the sampler of DDPO (arXiv:2305.13301).

    eta = 0 is the ODE, eta = 1 the ancestral sampling of DDPM. In flow coordinates
    y = x / (alpha + sigma) the equations lose their alphas: with q = sigma / alpha = s / (1 - s)
    eq. 16 is std = eta s' sqrt(1 - (q' / q)^2). Log-probs differ from those in x by the constant
    log(alpha' + sigma'), ratios and divergences not at all.
    """
    kept = s_next * (1 - s) / (s * (1 - s_next))
    return _renoise(x, v, s, s_next, kernel.eta * s_next * (1 - kept**2).sqrt())


def _renoise(x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, std: Tensor) -> Gaussian:
    """The predicted clean image at level s', whose noise is fresh for std of it, at most s'."""
    clean = x - s * v
    noise = x + (1 - s) * v
    return Gaussian((1 - s_next) * clean + (s_next**2 - std**2).sqrt() * noise, std)


_TRANSITIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Kernel], Gaussian]] = {
    "flow": _flow,
    "dance": _dance,
    "flash": _flash,
    "cps": _cps,
    "ddim": _ddim,
}


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))
