"""A flow model of a few hundred float64 weights, smooth everywhere: for finite differences.

Latents are [B, 2, 3]; images [B, 3, 2, 2] go through a decoder that mixes all latent elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unirl.core.types import Conditioning, SamplingParams
from unirl.models.lora import adapter_parameters, attach_lora
from unirl.samplers.guidance import classifier_free

LATENT_SHAPE = (2, 3)
_WIDTH = 6
STEP = 1e-6
"""Of the differences."""


@dataclass(frozen=True)
class Vectors(Conditioning):
    """A vector of 4 numbers for each sample."""

    value: Tensor
    """[B, 4] float64."""


class SmoothNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH + 1 + 4, 12)
        self.second = nn.Linear(12, _WIDTH)

    def forward(self, latents: Tensor, sigma: Tensor, vectors: Tensor) -> Tensor:
        inputs = torch.cat([latents.flatten(1), sigma[:, None], vectors], dim=1)
        return self.second(torch.tanh(self.first(inputs))).view_as(latents)


class SmoothModel:
    """What algorithms ask of a model, in float64, with an adapter that changes the output."""

    def __init__(self, seed: int = 0) -> None:
        self.network = SmoothNetwork()
        attach_lora(self.network, 2, 4.0, ("first", "second"), seed)
        self.network.double()
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.network.parameters():
            parameter.data = _randn(*parameter.shape, generator=generator) * 0.5
        self._decoder = _randn(_WIDTH, 12, generator=generator)

    @property
    def adapter(self) -> dict[str, nn.Parameter]:
        return adapter_parameters(self.network)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, Vectors)
        return self.network(latents, sigma, conditioning.value)

    def guided_velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        sampling: SamplingParams,
    ) -> Tensor:
        scale = sampling.guidance_scale
        return classifier_free(self.velocity, latents, sigma, conditioning, negative, scale)

    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        return torch.sigmoid(latents.flatten(1) @ self._decoder).view(-1, 3, 2, 2)


def vectors(count: int, seed: int = 3) -> Vectors:
    return Vectors(_randn(count, 4, generator=torch.Generator().manual_seed(seed)))


def latents(*leading: int, seed: int = 4) -> Tensor:
    """[*leading, 2, 3]."""
    return _randn(*leading, *LATENT_SHAPE, generator=torch.Generator().manual_seed(seed))


def assert_gradient_is_the_slope(
    loss: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter], num_directions: int = 4
) -> None:
    """The gradient of `loss` against central differences along random directions."""
    names, values = list(parameters), list(parameters.values())
    gradients = torch.autograd.grad(loss(), values)
    assert all(gradient.abs().max() > 1e-8 for gradient in gradients), names
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_directions):
        direction = [_randn(*value.shape, generator=generator) for value in values]
        slope = sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))
        up, down = (_along(loss, values, direction, h) for h in (STEP, -STEP))
        expected = torch.as_tensor(slope)
        torch.testing.assert_close((up - down) / (2 * STEP), expected, rtol=1e-6, atol=1e-9)


@torch.no_grad()
def _along(
    loss: Callable[[], Tensor],
    values: list[nn.Parameter],
    direction: list[Tensor],
    distance: float,
) -> Tensor:
    before = [value.clone() for value in values]
    for value, step in zip(values, direction, strict=True):
        value += distance * step
    found = loss()
    for value, old in zip(values, before, strict=True):
        value.copy_(old)
    return found


def _randn(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator)
