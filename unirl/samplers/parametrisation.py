"""Variance-preserving models, which predict noise or v, as velocity models in flow coordinates.

Such a model (DDPM, Stable Diffusion 1 and 2) knows x = alpha x0 + sigma e with
alpha^2 + sigma^2 = 1. Divided by alpha + sigma this is y = (1 - s) x0 + s e, a flow at level
s = sigma / (alpha + sigma), whose velocity is e - x0. A family calls its network on from_flow(y, s)
and hands back the velocity; solvers and kernels need to know no more.

Shapes: x, y and predictions are [B, *latent], s is [B].
"""

from __future__ import annotations

import math

from torch import Tensor


def flow_level(alpha_cumprod: float) -> float:
    """s = sigma / (alpha + sigma) for alpha^2 = alpha_cumprod."""
    alpha, sigma = math.sqrt(alpha_cumprod), math.sqrt(1 - alpha_cumprod)
    return sigma / (alpha + sigma)


def start_scale(first_level: float) -> float:
    """What unit noise is multiplied with to be latents at the first level; 1 at level 1.

    A model starts from x ~ N(0, 1), which is y = start_scale x.
    """
    return math.hypot(1 - first_level, first_level)


def to_flow(x: Tensor, s: Tensor) -> Tensor:
    """y = x / (alpha + sigma) = x sqrt((1 - s)^2 + s^2)."""
    return x * _scale(s, x)


def from_flow(y: Tensor, s: Tensor) -> Tensor:
    """x = (alpha + sigma) y."""
    return y / _scale(s, y)


def velocity_from_epsilon(x: Tensor, epsilon: Tensor, s: Tensor) -> Tensor:
    """e - x0 for predicted noise e at the model's own latents x, s < 1: (e - y) / (1 - s)."""
    return (epsilon - to_flow(x, s)) / (1 - _per_sample(s, x))


def velocity_from_v(x: Tensor, v_prediction: Tensor, s: Tensor) -> Tensor:
    """e - x0 for v = alpha e - sigma x0 (arXiv:2202.00512) at the model's own latents x:
    (alpha + sigma) v + (sigma - alpha) x."""
    return (v_prediction + (2 * _per_sample(s, x) - 1) * x) / _scale(s, x)


def _scale(s: Tensor, like: Tensor) -> Tensor:
    """1 / (alpha + sigma), [B, 1, ...]."""
    s = _per_sample(s, like)
    return ((1 - s) ** 2 + s**2).sqrt()


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))
