"""Published models that unirl cannot train yet, for plans: their real modules on the meta device.

What differs between them is how latents become the network's inputs, what the text encoders are
asked, and how latents are decoded; a `PublishedFamily` says that for one architecture, as the
model's diffusers pipeline does it. Prompts have model.max_sequence_length tokens in all of them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    Flux2Transformer2DModel,
    QwenImageTransformer2DModel,
    WanTransformer3DModel,
)
from torch import Tensor, nn
from transformers import (
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    UMT5EncoderModel,
)

from unirl.core.errors import ModelError
from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.base import DiffusionModel, LoadSettings
from unirl.models.on_meta import module_on_meta

NETWORK = "transformer"
DECODER = "vae"
CLIP_TOKENS = 77
NUM_FRAMES = 81
"""Frames of a video: five seconds at 16 a second, what Wan 2.1 was trained on."""
DISTILLED_GUIDANCE = 3.5
"""Input of guidance-distilled networks; its value changes no size."""
JOINT_ATTENTION = (
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
)


@dataclass(frozen=True)
class PublishedConditioning(Conditioning):
    """What the text encoders say about B prompts."""

    prompt_embeds: Tensor
    """[B, L, D]."""
    pooled: Tensor
    """[B, P]; P = 0 for a model that takes none."""


class PublishedFamily(ABC):
    """How one architecture is called. The modules are those of diffusers and transformers (Any)."""

    modules: ClassVar[Mapping[str, Any]]
    """Component -> class."""
    lora_targets: tuple[str, ...]
    block_classes: tuple[str, ...]
    pixels_per_token: int
    """Side of the square that one position of the network stands for."""

    @abstractmethod
    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one sample."""

    @abstractmethod
    def encode(self, encoders: Mapping[str, Any], batch: int, length: int) -> PublishedConditioning:
        """Of `batch` prompts of `length` tokens."""

    @abstractmethod
    def velocity(
        self, network: Any, latents: Tensor, sigma: Tensor, texts: PublishedConditioning
    ) -> Tensor:
        """Of [B, *latent]; only the number of its elements matters."""

    @abstractmethod
    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        """[B, 3, H, W] or [B, 3, frames, H, W] pixels."""


class PublishedModel(DiffusionModel):
    """The model contract around a `PublishedFamily`, with nothing but shapes behind it."""

    def __init__(
        self,
        family: PublishedFamily,
        modules: Mapping[str, nn.Module],
        config: Mapping[str, Any],
        settings: LoadSettings,
    ) -> None:
        """config: of the network."""
        self._family = family
        self._modules = modules
        self._config = config
        self._settings = settings

    @classmethod
    def load(cls, path: Path, settings: LoadSettings) -> Self:
        raise ModelError(f"{path}: unirl has no family for this model yet; it can only be planned.")

    @classmethod
    def blueprint(cls, path: Path, settings: LoadSettings) -> Self:
        """Of a folder with model_index.json and the components' config.json."""
        family = published_family(path)
        modules = {
            name: module_on_meta(
                path / name,
                module_class,
                settings.network_dtype if name == NETWORK else settings.frozen_dtype,
            )
            for name, module_class in family.modules.items()
            if settings.with_encoders or name == NETWORK
        }
        config = json.loads((path / NETWORK / "config.json").read_text())
        return cls(family, modules, config, settings)

    @property
    def network(self) -> nn.Module:
        return self._modules[NETWORK]

    @property
    def frozen_modules(self) -> Mapping[str, nn.Module]:
        return {name: module for name, module in self._modules.items() if name != NETWORK}

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[PromptRecord], sampling: SamplingParams
    ) -> PublishedConditioning:
        return self._family.encode(self._modules, len(prompts), self._settings.max_sequence_length)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, PublishedConditioning)
        with torch.autocast(
            latents.device.type,
            dtype=self._settings.compute_dtype,
            enabled=self._settings.compute_dtype != torch.float32,
        ):
            texts = conditioning._map(lambda embeds: embeds.float())
            velocity = self._family.velocity(self.network, latents, sigma, texts)
        return velocity.float().reshape(latents.shape)

    def pixels(self, latents: Tensor) -> Tensor:
        vae = self._modules[DECODER]
        dtype = next(vae.parameters()).dtype
        return (self._family.decode(vae, latents.to(dtype)).clamp(-1, 1).float() + 1) / 2

    def latent_shape(self, sampling: SamplingParams) -> tuple[int, ...]:
        """Raises ModelError for a size that is no whole number of the network's positions."""
        height, width = sampling.height, sampling.width
        multiple = self._family.pixels_per_token
        if height % multiple or width % multiple:
            raise ModelError(
                f"sampling.height={height}, sampling.width={width}: this model takes multiples of "
                f"{multiple} pixels. Change sampling.height and sampling.width."
            )
        return self._family.latent_shape(height, width)

    def sigmas(self, sampling: SamplingParams) -> tuple[float, ...]:
        """Equal steps: a plan asks only how many there are."""
        num_steps = sampling.num_inference_steps
        return (*(1 - step / num_steps for step in range(num_steps)), 0.0)

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> PublishedConditioning:
        length = self._settings.max_sequence_length
        width = self._config.get("joint_attention_dim", self._config.get("text_dim"))
        pooled = self._config.get("pooled_projection_dim", 0)
        return PublishedConditioning(
            torch.randn(batch, length, width, generator=generator),
            torch.randn(batch, pooled, generator=generator),
        )


class Flux2(PublishedFamily):
    """FLUX.2: latents of 32 channels at 1/8, kept packed as 128 at 1/16; three layers of Mistral's
    hidden states side by side."""

    modules: ClassVar[Mapping[str, Any]] = {
        NETWORK: Flux2Transformer2DModel,
        DECODER: AutoencoderKLFlux2,
        "text_encoder": Mistral3ForConditionalGeneration,
    }
    lora_targets = (*JOINT_ATTENTION, "attn.to_qkv_mlp_proj")
    block_classes = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
    pixels_per_token = 16

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return (128, height // 16, width // 16)

    def encode(self, encoders: Mapping[str, Any], batch: int, length: int) -> PublishedConditioning:
        ids = _tokens(batch, length)
        output = encoders["text_encoder"](
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            output_hidden_states=True,
            use_cache=False,
        )
        layers = torch.stack([output.hidden_states[k] for k in (10, 20, 30)], dim=1)
        embeds = layers.permute(0, 2, 1, 3).flatten(2)
        return PublishedConditioning(embeds, embeds.new_zeros(batch, 0))

    def velocity(
        self, network: Any, latents: Tensor, sigma: Tensor, texts: PublishedConditioning
    ) -> Tensor:
        tokens = latents.flatten(2).transpose(1, 2)
        return network(
            hidden_states=tokens,
            timestep=sigma,
            guidance=torch.full_like(sigma, DISTILLED_GUIDANCE),
            encoder_hidden_states=texts.prompt_embeds,
            txt_ids=torch.zeros(texts.prompt_embeds.shape[1], 4),
            img_ids=torch.zeros(tokens.shape[1], 4),
            return_dict=False,
        )[0]

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        return vae.decode(F.pixel_shuffle(latents, 2)).sample


class QwenImage(PublishedFamily):
    """Qwen-Image: latents of 16 channels at 1/8, packed 2 x 2; the last hidden state of Qwen2.5-VL
    after its template."""

    modules: ClassVar[Mapping[str, Any]] = {
        NETWORK: QwenImageTransformer2DModel,
        DECODER: AutoencoderKLQwenImage,
        "text_encoder": Qwen2_5_VLForConditionalGeneration,
    }
    lora_targets = JOINT_ATTENTION
    block_classes = ("QwenImageTransformerBlock",)
    pixels_per_token = 16
    template_tokens = 34
    """Tokens before the prompt, which the network does not get."""

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return (16, height // 8, width // 8)

    def encode(self, encoders: Mapping[str, Any], batch: int, length: int) -> PublishedConditioning:
        ids = _tokens(batch, self.template_tokens + length)
        output = encoders["text_encoder"](
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            output_hidden_states=True,
            use_cache=False,
        )
        embeds = output.hidden_states[-1][:, self.template_tokens :].clone()
        return PublishedConditioning(embeds, embeds.new_zeros(batch, 0))

    def velocity(
        self, network: Any, latents: Tensor, sigma: Tensor, texts: PublishedConditioning
    ) -> Tensor:
        batch, _, height, width = latents.shape
        return network(
            hidden_states=_packed(latents),
            timestep=sigma,
            encoder_hidden_states=texts.prompt_embeds,
            img_shapes=[[(1, height // 2, width // 2)]] * batch,
            return_dict=False,
        )[0]

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        return vae.decode(latents.unsqueeze(2)).sample[:, :, 0]


class Wan(PublishedFamily):
    """Wan 2.1: latents of 16 channels at 1/4 of the frames and 1/8 of the size; UMT5 tokens."""

    modules: ClassVar[Mapping[str, Any]] = {
        NETWORK: WanTransformer3DModel,
        DECODER: AutoencoderKLWan,
        "text_encoder": UMT5EncoderModel,
    }
    lora_targets = (
        *("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0"),
        *("attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0"),
    )
    block_classes = ("WanTransformerBlock",)
    pixels_per_token = 16

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return (16, (NUM_FRAMES - 1) // 4 + 1, height // 8, width // 8)

    def encode(self, encoders: Mapping[str, Any], batch: int, length: int) -> PublishedConditioning:
        ids = _tokens(batch, length)
        embeds = encoders["text_encoder"](ids, torch.ones_like(ids)).last_hidden_state
        return PublishedConditioning(embeds, embeds.new_zeros(batch, 0))

    def velocity(
        self, network: Any, latents: Tensor, sigma: Tensor, texts: PublishedConditioning
    ) -> Tensor:
        return network(
            hidden_states=latents,
            timestep=sigma * 1000,
            encoder_hidden_states=texts.prompt_embeds,
            return_dict=False,
        )[0]

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        return vae.decode(latents).sample


FAMILIES: Mapping[str, PublishedFamily] = {
    "Flux2Pipeline": Flux2(),
    "QwenImagePipeline": QwenImage(),
    "WanPipeline": Wan(),
}
"""By the `_class_name` of model_index.json."""


def published_family(folder: Path) -> PublishedFamily:
    return FAMILIES[pipeline_name(folder)]


def pipeline_name(folder: Path) -> str:
    return json.loads((folder / "model_index.json").read_text())["_class_name"]


def _tokens(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def _packed(latents: Tensor) -> Tensor:
    """[B, C, h, w] -> [B, h w / 4, 4 C]: squares of 2 x 2 become positions."""
    return F.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)
