"""The model contract: a family says how to encode, what the velocity is and how to decode.

Sampling loop, guidance, replay, LoRA and weight moves exist once, elsewhere.
Flow matching: x_sigma = (1 - sigma) x0 + sigma noise, velocity = noise - x0, sigma from 1 to 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from unirl.core.errors import ModelError
from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.samplers.guidance import classifier_free


class Frozen(Enum):
    """Which of the modules that are not trained are loaded."""

    ALL = "text encoders and decoder"
    DECODER = "decoder"
    """`encode` is never called: prompts were encoded before."""
    NONE = "none"
    """A train stack beside a rollout engine of its own: neither is `decode`."""


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """How a family reads its weights; `unirl.models.trainable.load_settings` makes a recipe's."""

    frozen_dtype: torch.dtype
    """Storage of the weights that are not trained."""
    compute_dtype: torch.dtype
    """Arithmetic of the network; below float32 by autocast."""
    max_sequence_length: int
    """Tokens a prompt is cut or padded to, in families that do so."""
    frozen: Frozen
    quantization: str | None = None
    """Of the network's weights: None or `int8`."""

    @property
    def network_dtype(self) -> torch.dtype:
        """Storage of the network: float32 arithmetic needs float32 weights."""
        return torch.float32 if self.compute_dtype == torch.float32 else self.frozen_dtype


class DiffusionModel(ABC):
    """A generator with its text encoders and decoder, all in eval mode, nothing requiring grad."""

    blueprint_reads_weights: ClassVar[bool] = True
    """Whether `blueprint` takes more than configuration files, and so its time."""

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

    def write_adapter(self, folder: Path) -> Path:
        """The adapter as a file in `folder` that the family's other programs load.

        Raises ModelError where there is none, or no such format.
        """
        raise ModelError(
            f"{type(self).__name__} has no file format for adapters. Export the whole model "
            "with the adapter merged in: --as model."
        )

    def write_model(self, folder: Path) -> Path:
        """The network with its adapter merged in, as `load` and other programs read it: what
        model.path can be set to. The adapter is gone from this model afterwards.

        Raises ModelError where there is no such format.
        """
        raise ModelError(f"{type(self).__name__} has no file format for whole models")

    def network_files(self) -> Mapping[str, Sequence[Path]]:
        """The safetensors files that hold a skeleton's parameters, by the prefix that the network
        puts before the names in them."""
        return {}

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """The denoising network: the only part that is trained."""

    @property
    def trained_components(self) -> Mapping[str, nn.Module]:
        """The network, or those it is made of, by their names in a diffusers pipeline; for exports.

        Empty in families that have no pipeline.
        """
        return {}

    @property
    @abstractmethod
    def frozen_modules(self) -> Mapping[str, nn.Module]:
        """Text encoders and decoder by name, those that were loaded."""

    @abstractmethod
    def encode(self, prompts: Sequence[PromptRecord], sampling: SamplingParams) -> Conditioning:
        """[len(prompts), ...] all that the network is told: texts, images, embedded guidance."""

    def encode_negative(
        self, prompts: Sequence[PromptRecord], sampling: SamplingParams
    ) -> Conditioning | None:
        """[len(prompts), ...] what guidance leads away from: the empty text.

        None where guidance needs no second answer of the network.
        """
        if not self.needs_negative(sampling):
            return None
        empty = self.encode([PromptRecord("", "")], sampling)
        return empty.select(torch.zeros(len(prompts), dtype=torch.int64))

    def needs_negative(self, sampling: SamplingParams) -> bool:
        """Whether guidance leads away from something: False where it is off, or an input of the
        network."""
        return sampling.guidance_scale > 1

    def check_prompts(self, prompts: Sequence[PromptRecord], key: str) -> None:
        """Raise DataError naming the config key for a prompt that `encode` would refuse.

        Called once with all prompts before a run starts, so it must be cheap; families that take
        any text leave it as it is.
        """
        return

    @abstractmethod
    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """[B, *latent] float32 velocity for latents [B, *latent] float32 at sigma [B] float32."""

    def guided_velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        sampling: SamplingParams,
    ) -> Tensor:
        """[B, *latent] what sampling follows, from what `encode` and `encode_negative` gave."""
        scale = sampling.guidance_scale
        return classifier_free(self.velocity, latents, sigma, conditioning, negative, scale)

    @abstractmethod
    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        """[B, 3, H, W] float32 images in [0, 1] of clean latents [B, *latent], with gradient; of
        videos [B, F', 3, H, W], the frames of sampling.decoded_frames."""

    @torch.no_grad()
    def decode(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        """`pixels` as uint8."""
        return (self.pixels(latents, sampling) * 255).round().to(torch.uint8)

    def latents_of(self, images: Tensor) -> Tensor:
        """[B, *latent] float32 clean latents of images [B, 3, H, W] uint8: the way back; of videos
        [B, F, 3, H, W].

        Raises ModelError in families that have none.
        """
        raise ModelError(f"{type(self).__name__} has no way from images to latents")

    @abstractmethod
    def latent_shape(self, sampling: SamplingParams) -> tuple[int, ...]:
        """Shape of one sample's latents, without the batch dimension.

        Raises ModelError for a size that the family does not take.
        """

    @abstractmethod
    def sigmas(self, sampling: SamplingParams) -> tuple[float, ...]:
        """T + 1 noise levels from 1 to 0: the schedule this family is deployed with."""

    @abstractmethod
    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> Conditioning:
        """Random but valid conditioning, made without encoders; for probes."""
