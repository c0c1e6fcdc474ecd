"""One stochastic sampler step as a distribution over the next latents."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Gaussian:
    """Independent Gaussians over latent elements.

    Log-probs and divergences are means, not sums, over latent elements (float32): their size does
    not depend on the resolution, and clip ranges are small (1e-5 to 1e-2).
    """

    mean: Tensor
    """[B, *latent] float32."""
    std: Tensor
    """[B, 1, ...] float32, above 0, of the same number of dimensions as mean."""

    def __post_init__(self) -> None:
        expected = (len(self.mean), *[1] * (self.mean.ndim - 1))
        if tuple(self.std.shape) != expected:
            raise ValueError(f"std has shape {tuple(self.std.shape)}, expected {expected}")

    def sample(self, noise: Tensor) -> Tensor:
        """mean + std * noise, for noise [B, *latent] ~ N(0, 1)."""
        return self.mean + self.std * noise

    def log_prob(self, value: Tensor) -> Tensor:
        """[B] log-density of value [B, *latent], mean over latent elements."""
        if value.shape != self.mean.shape:
            raise ValueError(f"value {tuple(value.shape)} against mean {tuple(self.mean.shape)}")
        elements = (
            -((value - self.mean) ** 2) / (2 * self.std**2)
            - self.std.log()
            - 0.5 * math.log(2 * math.pi)
        )
        return _mean_over_latent(elements)

    def kl(self, other: Gaussian) -> Tensor:
        """[B] KL(self || other) in nats, mean over latent elements."""
        # Apart, so that for equal stds, where it is exactly 0, nothing is rounded into small KLs.
        of_stds = (other.std / self.std).log() + ((self.std / other.std) ** 2 - 1) / 2
        return _mean_over_latent(of_stds + (self.mean - other.mean) ** 2 / (2 * other.std**2))


def _mean_over_latent(elements: Tensor) -> Tensor:
    return elements.mean(dim=tuple(range(1, elements.ndim)))
