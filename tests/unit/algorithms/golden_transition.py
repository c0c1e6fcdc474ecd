"""Rows for loss tests: the transition of the reference numbers, and one with any latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from builders import sampling_params
from golden_inputs import golden, golden_tensors
from torch import Tensor, nn

from unirl.algorithms.base import Policy
from unirl.algorithms.transitions import TransitionRows
from unirl.core.types import Conditioning
from unirl.models.base import DiffusionModel
from unirl.samplers.kernels import make_kernel

REFERENCE = golden("losses.json")
INPUTS = golden_tensors()[REFERENCE["case"]["shape"]]
SIGMAS = tuple(golden("kernels.json")["sigmas"][REFERENCE["case"]["schedule"]])
STEP = REFERENCE["case"]["step"]
TIME_STEP = SIGMAS[STEP] - SIGMAS[STEP + 1]


@dataclass(frozen=True)
class Nothing(Conditioning):
    rows: Tensor


class FixedVelocity:
    """A model that answers every question with one tensor."""

    def __init__(self, velocity: Tensor) -> None:
        self.network = nn.Identity()
        self._velocity = velocity

    def guided_velocity(self, *question: Any) -> Tensor:
        return self._velocity


def fixed(velocity: Tensor) -> Policy:
    """A policy that has this velocity everywhere, without a reference."""
    return Policy(cast(DiffusionModel, FixedVelocity(velocity)), {}, progress=0.0)


def reference_rows() -> TransitionRows:
    """The two samples of the reference numbers."""
    sigma, sigma_next = torch.full((2,), SIGMAS[STEP]), torch.full((2,), SIGMAS[STEP + 1])
    next_latents = INPUTS.next_latents(sigma[0], sigma_next[0])
    kernel = make_kernel("flow", REFERENCE["case"]["noise_level"], SIGMAS)
    old = kernel.transition(INPUTS.x, INPUTS.v_old, sigma, sigma_next).log_prob(next_latents)
    return rows_of(
        latents=INPUTS.x,
        next_latents=next_latents,
        sigma=sigma,
        sigma_next=sigma_next,
        step=torch.full((2,), STEP),
        rollout_log_prob=old,
        advantages=torch.tensor(REFERENCE["case"]["advantages"]),
        kernel=kernel,
    )


def drawn_rows(
    shape: tuple[int, ...], kernel: str = "flow", dtype: torch.dtype = torch.float64
) -> tuple[TransitionRows, Tensor]:
    """Four rows on the first steps of a schedule, and the old velocity they were drawn with.

    Content depends on the number of elements alone.
    """
    generator = torch.Generator().manual_seed(3)
    latents, velocity, noise = (
        torch.randn(4, *shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)
    )
    sigmas = (1.0, 0.85, 0.6, 0.3, 0.0)
    step = torch.tensor([0, 1, 2, 1])
    levels = torch.tensor(sigmas, dtype=dtype)
    made = make_kernel(kernel, 0.7, sigmas)
    gaussian = made.transition(latents, velocity, levels[step], levels[step + 1])
    next_latents = gaussian.sample(noise)
    rows = rows_of(
        latents=latents,
        next_latents=next_latents,
        sigma=levels[step],
        sigma_next=levels[step + 1],
        step=step,
        rollout_log_prob=gaussian.log_prob(next_latents),
        advantages=torch.tensor([0.7, -1.1, 1.3, -0.4], dtype=dtype),
        kernel=made,
    )
    return rows, velocity


def rows_of(**fields: Any) -> TransitionRows:
    """Rows of different samples and states, without guidance."""
    count = len(fields["latents"])
    return TransitionRows(
        sample_index=torch.arange(count),
        state=torch.arange(count),
        conditioning=Nothing(torch.zeros(count, 1)),
        negative_conditioning=None,
        sampling=sampling_params(),
        **fields,
    )
