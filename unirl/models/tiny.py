"""The tiny family: the text-to-image model that ships with unirl, behind the model contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from unirl.core.errors import DataError, ModelError
from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.memory.movers import own_storages
from unirl.models.base import DiffusionModel, LoadSettings
from unirl.models.lora import merge_adapter
from unirl.models.tiny_dit import (
    TinyDiT,
    TinyTokenizer,
    load_tiny_dit,
    load_tiny_skeleton,
    save_tiny_dit,
)


@dataclass(frozen=True)
class TinyConditioning(Conditioning):
    """Token ids; the embedding table is part of the network."""

    token_ids: Tensor
    """[B, L] int64."""


class TinyModel(DiffusionModel):
    """Pixel-space flow model: the latents are the image in [-1, 1], so decoding is rounding."""

    blueprint_reads_weights: ClassVar = False

    def __init__(
        self, path: Path, network: TinyDiT, tokenizer: TinyTokenizer, compute_dtype: torch.dtype
    ) -> None:
        self._path = path
        self._network = network
        self._tokenizer = tokenizer
        self._compute_dtype = compute_dtype

    @classmethod
    def load(cls, path: Path, settings: LoadSettings) -> TinyModel:
        model = cls._read(load_tiny_dit, path, settings)
        own_storages(model.network)
        return model

    @classmethod
    def load_skeleton(cls, path: Path, settings: LoadSettings) -> TinyModel:
        return cls._read(load_tiny_skeleton, path, settings)

    @classmethod
    def blueprint(cls, path: Path, settings: LoadSettings) -> TinyModel:
        return cls._read(load_tiny_skeleton, path, settings)

    @classmethod
    def _read(
        cls,
        reader: Callable[[Path], tuple[TinyDiT, TinyTokenizer]],
        path: Path,
        settings: LoadSettings,
    ) -> TinyModel:
        try:
            network, tokenizer = reader(path)
        except (FileNotFoundError, ValueError) as error:
            raise ModelError(f"model.path: {error}") from error
        network = network.to(settings.network_dtype).eval().requires_grad_(False)
        return cls(path, network, tokenizer, settings.compute_dtype)

    def write_model(self, folder: Path) -> Path:
        merge_adapter(self._network)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "model.safetensors"
        save_tiny_dit(file, self._network, self._tokenizer, torch.float32)
        return file

    def network_files(self) -> Mapping[str, Sequence[Path]]:
        return {"": [self._path]}

    @property
    def network(self) -> nn.Module:
        return self._network

    @property
    def frozen_modules(self) -> Mapping[str, nn.Module]:
        return {}

    def encode(self, prompts: Sequence[PromptRecord], sampling: SamplingParams) -> TinyConditioning:
        texts = [prompt.text for prompt in prompts]
        return TinyConditioning(self._tokenizer.encode(texts).to(self._device))

    def check_prompts(self, prompts: Sequence[PromptRecord], key: str) -> None:
        try:
            self._tokenizer.encode([prompt.text for prompt in prompts])
        except ValueError as error:
            raise DataError(f"{key}: {error}") from error

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, TinyConditioning)
        with torch.autocast(
            latents.device.type, self._compute_dtype, enabled=self._compute_dtype != torch.float32
        ):
            return self._network(latents, sigma, conditioning.token_ids).float()

    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        return (latents.clamp(-1, 1) + 1) / 2

    def latents_of(self, images: Tensor) -> Tensor:
        return images.to(self._device).float() / 127.5 - 1

    def latent_shape(self, sampling: SamplingParams) -> tuple[int, ...]:
        return (3, sampling.height, sampling.width)

    def sigmas(self, sampling: SamplingParams) -> tuple[float, ...]:
        num_steps = sampling.num_inference_steps
        return (*(1 - step / num_steps for step in range(num_steps)), 0.0)

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> TinyConditioning:
        shape = (batch, self._tokenizer.num_tokens)
        vocabulary_size = len(self._tokenizer.vocabulary)
        token_ids = torch.randint(vocabulary_size, shape, generator=generator)
        return TinyConditioning(token_ids.to(self._device))

    @property
    def _device(self) -> torch.device:
        return self._network.text_embed.weight.device
