"""Renoised rows and a small smooth model in float64, for the forward-process losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unirl.algorithms.base import Policy
from unirl.algorithms.renoised import CleanSamples, RenoisedRows
from unirl.core.types import Conditioning

LAYOUTS = {"packed": (6, 4), "image": (2, 3, 4), "video": (2, 3, 2, 2)}
"""Latents of 24 numbers in 2, 3 and 4 dimensions, 3-D to 5-D with the batch."""


@dataclass(frozen=True)
class Words(Conditioning):
    meaning: Tensor
    """[B] float64."""


class SmoothModel:
    """v = tanh(a x + b t + c meaning) + d, every parameter a scalar of its own per element."""

    def __init__(self, num_elements: int = 24, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.network = nn.Module()
        for name in "abcd":
            values = torch.randn(num_elements, generator=generator, dtype=torch.float64)
            self.network.register_parameter(name, nn.Parameter(values))

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.network.parameters())

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, Words)
        a, b, c, d = self.parameters
        inputs = b * sigma[:, None] + c * conditioning.meaning[:, None]
        return (torch.tanh(a * latents.flatten(1) + inputs) + d).view_as(latents)


def policy_of(model: Any, **weights: Callable[[], Any]) -> Policy:
    """A policy around a stand-in model; other weights by name."""
    return Policy(model, weights, progress=0.0)


def moved(model: SmoothModel, by: float) -> Callable[[], Any]:
    """A context in which all parameters are larger by `by`."""

    class Moved:
        def __enter__(self) -> None:
            self._shift(by)

        def __exit__(self, *error: object) -> None:
            self._shift(-by)

        @torch.no_grad()
        def _shift(self, by: float) -> None:
            for parameter in model.parameters:
                parameter.add_(by)

    return Moved


def renoised_rows(layout: str = "image", num_levels: int = 2) -> RenoisedRows:
    """3 samples at `num_levels` levels; the same numbers in every layout."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shape = LAYOUTS[layout]
    num_rows = 3 * num_levels
    samples = CleanSamples(
        latents=draw(3, 24).view(3, *shape),
        advantages=torch.tensor([1.5, -0.7, 9.0], dtype=torch.float64),
        conditioning=Words(draw(3)),
    )
    time = 0.05 + 0.9 * torch.rand(num_rows, generator=generator, dtype=torch.float64)
    return RenoisedRows(
        samples, torch.arange(3).repeat(num_levels), time, draw(num_rows, 24).view(-1, *shape)
    )


def assert_gradient_is_that_of(
    model: SmoothModel, loss: Callable[[], Tensor], gradients: list[Tensor]
) -> None:
    """Against central differences of `loss` in three random directions."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        directions = [
            torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in model.parameters
        ]

        def along(step: float, directions: list[Tensor] = directions) -> float:
            with torch.no_grad():
                for parameter, direction in zip(model.parameters, directions, strict=True):
                    parameter.add_(step * direction)
                value = float(loss())
                for parameter, direction in zip(model.parameters, directions, strict=True):
                    parameter.sub_(step * direction)
            return value

        step = 1e-5
        numeric = torch.tensor((along(step) - along(-step)) / (2 * step), dtype=torch.float64)
        exact = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
        torch.testing.assert_close(exact, numeric, rtol=1e-6, atol=1e-9)
