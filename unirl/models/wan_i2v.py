"""Wan 2.1 and 2.2, image to video, read from a local diffusers folder (see `wan_flow`).

A prompt's one image is the first frame. The network gets its latents, with a mask of what is given,
behind the noisy ones; Wan 2.1 also gets what CLIP sees in it. What guidance leads away from keeps
the image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanTransformer3DModel
from PIL import Image
from torch import Tensor
from transformers import (
    BatchFeature,
    CLIPImageProcessor,
    CLIPVisionModel,
    UMT5EncoderModel,
)

from unirl.core.errors import ModelError
from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.base import LoadSettings
from unirl.models.condition_images import open_images, require_images
from unirl.models.diffusers_folder import DiffusersFolder, PipelineParts, RulesInFile
from unirl.models.wan_flow import SCHEDULERS, WanFlowModel

TEXT_TOKENS = 512
"""Of every prompt where CLIP's tokens stand before them: the network's attention counts on it."""
CLIP_PIXELS = 224


@dataclass(frozen=True)
class WanImageConditioning(Conditioning):
    """What the network is told about B prompts and their images."""

    prompt_embeds: Tensor
    """[B, max_sequence_length, D] UMT5 tokens, zeros after a prompt's end."""
    first_frame: Tensor
    """[B, 4 + C, f, h, w] float32: mask of the frames that are given, and their latents."""
    image_embeds: Tensor
    """[B, 257, P] CLIP's view of the image; [B, 0, 0] for networks that take none."""


class BlankImageProcessor:
    """Stands in for CLIP's in plans."""

    def __call__(self, images: Image.Image, **_: Any) -> BatchFeature:
        return BatchFeature({"pixel_values": torch.zeros(1, 3, CLIP_PIXELS, CLIP_PIXELS)})


class WanImageToVideoModel(WanFlowModel):
    """The video transformer or both of them, UMT5, the causal VAE and CLIP's image encoder."""

    parts: ClassVar = PipelineParts(
        family="wan_i2v",
        pipelines={"WanImageToVideoPipeline": WanImageToVideoPipeline},
        networks={"transformer": WanTransformer3DModel, "transformer_2": WanTransformer3DModel},
        modules={
            "vae": AutoencoderKLWan,
            "text_encoder": UMT5EncoderModel,
            "image_encoder": CLIPVisionModel,
        },
        processors={"tokenizer": RulesInFile, "image_processor": CLIPImageProcessor},
        blank={"image_processor": BlankImageProcessor},
        schedulers=SCHEDULERS,
        optional=("transformer_2", "image_encoder", "image_processor"),
    )

    def __init__(
        self,
        folder: DiffusersFolder,
        networks: Mapping[str, Any],
        frozen: Mapping[str, Any] | None,
        settings: LoadSettings,
    ) -> None:
        """Raises ModelError for a network that the settings or one image do not fit."""
        super().__init__(folder, networks, frozen, settings)
        # Of the module, which knows the keys that older files lack.
        config = networks["transformer"].config
        self._sees_clip = config["image_dim"] is not None
        if self._sees_clip and settings.max_sequence_length != TEXT_TOKENS:
            raise ModelError(
                f"model.max_sequence_length={settings.max_sequence_length}: this network takes "
                f"texts of {TEXT_TOKENS} tokens. Set model.max_sequence_length={TEXT_TOKENS}."
            )
        if config["pos_embed_seq_len"] is not None:
            raise ModelError(
                f"model.path={folder.path}: this network takes a first and a last frame (FLF2V), "
                "which unirl does not run. Set model.path to an I2V model."
            )

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[PromptRecord], sampling: SamplingParams
    ) -> WanImageConditioning:
        """By the pipeline's own methods. Raises DataError for a prompt without its one image."""
        require_images(prompts, range(1, 2), "prompts")
        images = [image for prompt in prompts for image in open_images(prompt)]
        texts = self.encode_texts(prompts)
        seen = [self._seen(image) for image in images] if self._sees_clip else []
        return WanImageConditioning(
            texts,
            torch.cat([self._first_frame(image, sampling) for image in images]),
            torch.cat(seen) if seen else texts.new_zeros(len(prompts), 0, 0),
        )

    def encode_negative(
        self, prompts: Sequence[PromptRecord], sampling: SamplingParams
    ) -> WanImageConditioning | None:
        """The same images without a text."""
        if sampling.guidance_scale <= 1:
            return None
        return self.encode([replace(prompt, text="") for prompt in prompts], sampling)

    def network_inputs(self, latents: Tensor, conditioning: Conditioning) -> dict[str, Tensor]:
        assert isinstance(conditioning, WanImageConditioning)
        inputs = {
            "hidden_states": torch.cat([latents, conditioning.first_frame], dim=1),
            # The embeddings may be bf16 beside a float32 network; widening them is exact.
            "encoder_hidden_states": conditioning.prompt_embeds.float(),
        }
        if self._sees_clip:
            inputs["encoder_hidden_states_image"] = conditioning.image_embeds.float()
        return inputs

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> WanImageConditioning:
        channels, *rest = self.latent_shape(sampling)
        config = self.folder.config("transformer")
        given = config["in_channels"] - channels
        seen = (257, config["image_dim"]) if self._sees_clip else (0, 0)
        conditioning = WanImageConditioning(
            self.example_texts(batch, generator),
            torch.randn(batch, given, *rest, generator=generator),
            torch.randn(batch, *seen, generator=generator),
        )
        return conditioning.to(next(self.network.parameters()).device)

    def _first_frame(self, image: Image.Image, sampling: SamplingParams) -> Tensor:
        """[1, 4 + C, f, h, w] float32."""
        pipeline, (height, width) = self.pipeline, (sampling.height, sampling.width)
        pixels = pipeline.video_processor.preprocess(image, height=height, width=width)
        unused = torch.empty(0)
        _, condition = pipeline.prepare_latents(
            pixels.float().to(pipeline.vae.device),
            batch_size=1,
            height=height,
            width=width,
            num_frames=sampling.num_frames,
            dtype=torch.float32,
            device=pipeline.vae.device,
            latents=unused,
        )
        return condition

    def _seen(self, image: Image.Image) -> Tensor:
        """[1, 257, P]."""
        return self.pipeline.encode_image(image, self.pipeline.image_encoder.device)
