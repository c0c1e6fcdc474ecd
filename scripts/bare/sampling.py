"""Sampling in the fewest lines: the kernels, the ODE steps between them, one loop.

In goes a velocity, out come paths. Shapes: x, v and means are [B, 3, H, W], noise levels s meet
them as [B, 1, 1, 1]. Names as in the papers and in `unirl.samplers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from unirl.config.schema import SamplingConfig

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x, s [B], token ids [B, L]) -> v."""


def transition(
    sampling: SamplingConfig, sigmas: Tensor, x: Tensor, v: Tensor, s: Tensor, s_next: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a stochastic step, on a schedule `sigmas` [T+1]."""
    eta, dt = sampling.eta, s_next - s
    match sampling.kernel:
        case "cps":
            return renoised(x, v, s, s_next, s_next * math.sin(eta * math.pi / 2))
        case "ddim":
            kept = s_next * (1 - s) / (s * (1 - s_next))
            return renoised(x, v, s, s_next, s_next * eta * (1 - kept**2).sqrt())
        case "flow":
            diffusion = eta * (s / (1 - s.clamp(max=float(sigmas[1])))).sqrt()
        case "dance":
            diffusion = eta * torch.ones_like(s)
        case "flash":
            diffusion = eta * (sigmas[-2] + (sigmas[0] - sigmas[-2]) * s)
    drift = diffusion**2 / (2 * s) * dt
    return x * (1 + drift) + v * (dt + drift * (1 - s)), diffusion * (-dt).sqrt()


def renoised(x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    clean, noise = x - s * v, x + (1 - s) * v
    return (1 - s_next) * clean + (s_next**2 - std**2).sqrt() * noise, std


def log_prob(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """[B] up to a constant, which cancels in a ratio; of another mean it is minus the KL to it."""
    return -((value - mean) ** 2 / (2 * std**2)).mean((1, 2, 3))


def ode_step(
    solver: str, sigmas: Tensor, step: int, x: Tensor, v: Tensor, clean_before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The next x and the clean image predicted here; `clean_before` is that of an ODE step."""
    s, s_next = sigmas[step], sigmas[step + 1]
    following, clean = x + (s_next - s) * v, x - s * v
    if solver == "dpmpp_2m" and clean_before is not None and s_next > 0:
        before, now, after = ((1 - sigmas) / sigmas).log()[step - 1 : step + 2]
        reach = (after - now) / (2 * (now - before))
        following = following + (1 - s_next / s) * reach * (clean - clean_before)
    return following, clean


@torch.no_grad()
def denoise(
    sampling: SamplingConfig,
    velocity: Velocity,
    sigmas: Tensor,
    ids: Tensor,
    sde_steps: Tensor,
    per_start: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Paths [T+1, B, 3, H, W], states [T, B] and log-probs [T, B], for sde_steps [B, S].

    Every `per_start` samples begin at one noise. A state is the first sample that is at the same
    place before the step: only that one is asked about. Log-probs are those of stochastic steps.
    """
    samples = torch.arange(len(ids))
    starts = samples // per_start * per_start
    x, clean = torch.randn(len(ids), 3, sampling.height, sampling.width)[starts], None
    path, states, log_probs = [x], [], []
    for step, (s, s_next) in enumerate(pairwise(sigmas)):
        states.append(starts.where((sde_steps >= step).all(1), samples))
        asked, kind = states[-1].unique(return_inverse=True)
        v = velocity(x[asked], s.expand(len(asked)), ids[asked])[kind]
        drawn, value = (sde_steps == step).any(1), torch.zeros(len(x))
        following, clean = ode_step(sampling.solver, sigmas, step, x, v, clean)
        if drawn.any():
            levels = (s.view(1, 1, 1, 1), s_next.view(1, 1, 1, 1))
            mean, std = transition(sampling, sigmas, x, v, *levels)
            noisy = mean + std * torch.randn_like(x)
            following, clean = noisy.where(drawn.view(-1, 1, 1, 1), following), None
            value = log_prob(noisy, mean, std)
        x = following
        path.append(x)
        log_probs.append(value)
    return torch.stack(path), torch.stack(states), torch.stack(log_probs)
