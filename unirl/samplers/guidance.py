"""Classifier-free guidance around a model's velocity."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unirl.core.types import Conditioning

Velocity = Callable[[Tensor, Tensor, Conditioning], Tensor]
"""(latents [B, *latent], sigma [B], conditioning of B) -> velocity [B, *latent]."""


def classifier_free(
    velocity: Velocity,
    latents: Tensor,
    sigma: Tensor,
    conditioning: Conditioning,
    negative: Conditioning | None,
    scale: float,
) -> Tensor:
    """[B, *latent] v_uncond + scale (v_cond - v_uncond) (arXiv:2207.12598).

    negative=None means no guidance. Both halves run in one batch, unconditional first, as in most
    diffusers pipelines: two batches of half the size would round differently.
    """
    if negative is None:
        return velocity(latents, sigma, conditioning)
    both = type(conditioning).cat([negative, conditioning])
    pair = velocity(torch.cat([latents, latents]), torch.cat([sigma, sigma]), both)
    unconditional, conditional = pair.chunk(2)
    return unconditional + scale * (conditional - unconditional)


def classifier_free_apart(
    velocity: Velocity,
    latents: Tensor,
    sigma: Tensor,
    conditioning: Conditioning,
    negative: Conditioning | None,
    scale: float | Tensor,
) -> Tensor:
    """The same by two calls, as the pipelines of video models do; scale may differ by row."""
    conditional = velocity(latents, sigma, conditioning)
    if negative is None:
        return conditional
    unconditional = velocity(latents, sigma, negative)
    return unconditional + scale * (conditional - unconditional)
