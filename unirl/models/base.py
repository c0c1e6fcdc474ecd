"""The model contract: a family says how to encode, what the velocity is and how to decode.

Sampling loop, guidance, replay, LoRA and weight moves exist once, elsewhere.
Flow matching: x_sigma = (1 - sigma) x0 + sigma noise, velocity = noise - x0, sigma from 1 to 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from unirl.core.errors import ModelError
from unirl.core.types import Conditioning


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """How a family reads its weights; `unirl.models.trainable.load_settings` makes a recipe's."""

    frozen_dtype: torch.dtype
    """Storage of the weights that are not trained."""
    compute_dtype: torch.dtype
    """Arithmetic of the network; below float32 by autocast."""
    max_sequence_length: int
    """Tokens a prompt is cut or padded to, in families that do so."""
    with_encoders: bool
    """False leaves out text encoders and decoder: a train stack beside a rollout engine of its own
    needs only the network, `encode` and `decode` are never called then."""

    @property
    def network_dtype(self) -> torch.dtype:
        """Storage of the network: float32 arithmetic needs float32 weights."""
        return torch.float32 if self.compute_dtype == torch.float32 else self.frozen_dtype


class DiffusionModel(ABC):
    """A generator with its text encoders and decoder, all in eval mode, nothing requiring grad."""

    @classmethod
    @abstractmethod
    def load(cls, path: Path, settings: LoadSettings) -> Self:
        """Read weights from `path` to the CPU.

        Raises ModelError naming the path when it cannot be read.
        """

    @classmethod
    def load_skeleton(cls, path: Path, settings: LoadSettings) -> Self:
        """Like `load`, for a network that will be sharded over several devices.

        A family that keeps its network in safetensors files leaves the network's parameters (not
        its buffers) on the meta device and gives `network_files`, so that no process ever holds
        the whole. Without this method each process loads the whole network on the CPU first.
        """
        return cls.load(path, settings)

    @classmethod
    def blueprint(cls, path: Path, settings: LoadSettings) -> Self:
        """Like `load`, with every parameter on the meta device; buffers may be real. For plans.

        A family that can build its modules from config files alone needs no weights here, and any
        text may be encoded alike. Without this method the weights are read and dropped.
        """
        model = cls.load(path, settings)
        for module in [model.network, *model.frozen_modules.values()]:
            module.to("meta")
        return model

    def network_files(self) -> Sequence[Path]:
        """The safetensors files that hold a skeleton's parameters, under their own names."""
        return ()

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """The denoising network: the only part that is trained."""

    @property
    @abstractmethod
    def frozen_modules(self) -> Mapping[str, nn.Module]:
        """Text encoders and decoder by name, those that were loaded."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> Conditioning:
        """[len(texts), ...] conditioning; the empty text is the unconditional one."""

    def check_prompts(self, texts: Sequence[str], key: str) -> None:
        """Raise DataError naming the config key for a text that `encode` would refuse.

        Called once with all prompts before a run starts, so it must be cheap; families that take
        any text leave it as it is.
        """
        return

    @abstractmethod
    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """[B, *latent] float32 velocity for latents [B, *latent] float32 at sigma [B] float32."""

    @abstractmethod
    def pixels(self, latents: Tensor) -> Tensor:
        """[B, 3, H, W] float32 images in [0, 1] of clean latents [B, *latent], with gradient."""

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """[B, 3, H, W] uint8 images of clean latents [B, *latent]."""
        return (self.pixels(latents) * 255).round().to(torch.uint8)

    def latents_of(self, images: Tensor) -> Tensor:
        """[B, *latent] float32 clean latents of images [B, 3, H, W] uint8: the way back.

        Raises ModelError in families that have none.
        """
        raise ModelError(f"{type(self).__name__} has no way from images to latents")

    @abstractmethod
    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one sample's latents, without the batch dimension."""

    @abstractmethod
    def sigmas(self, num_steps: int, height: int, width: int) -> tuple[float, ...]:
        """num_steps + 1 noise levels from 1 to 0: the schedule this family is deployed with."""

    @abstractmethod
    def example_conditioning(self, batch: int, generator: torch.Generator) -> Conditioning:
        """Random but valid conditioning, made without text encoders; for probes."""
