"""Stable Diffusion 1.x and 2.x, read from a local diffusers folder.

The safety checker is not loaded: rewards and the researcher see every image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.diffusers_folder import PipelineParts
from unirl.models.unet import CLIP_TOKENS, SCHEDULERS, TrainedLevels, UNetModel


@dataclass(frozen=True)
class Sd15Conditioning(Conditioning):
    """What the network is told about B samples."""

    prompt_embeds: Tensor
    """[B, 77, D] CLIP tokens."""


class StableDiffusion15Model(UNetModel):
    """The UNet, CLIP and the VAE."""

    parts: ClassVar = PipelineParts(
        family="sd15",
        pipelines={"StableDiffusionPipeline": StableDiffusionPipeline},
        networks={"unet": UNet2DConditionModel},
        modules={"vae": AutoencoderKL, "text_encoder": CLIPTextModel},
        processors={"tokenizer": CLIPTokenizer},
        schedulers=SCHEDULERS,
        fixed={"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False},
    )

    @cached_property
    def levels(self) -> TrainedLevels:
        # The pipeline counts timesteps from 1 too, whatever the folder says.
        return TrainedLevels(self.scheduler, steps_offset=1)

    @torch.no_grad()
    def encode(self, prompts: Sequence[PromptRecord], sampling: SamplingParams) -> Sd15Conditioning:
        """By the pipeline's own method: CLIP reads 77 tokens of a prompt."""
        embeds, _ = self.pipeline.encode_prompt(
            [prompt.text for prompt in prompts],
            device=self.pipeline.text_encoder.device,
            num_images_per_prompt=1,
            do_classifier_free_guidance=False,
        )
        return Sd15Conditioning(embeds)

    def prediction(self, x: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, Sd15Conditioning)
        return self.network(
            x,
            timesteps,
            encoder_hidden_states=conditioning.prompt_embeds.float(),
            return_dict=False,
        )[0]

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> Sd15Conditioning:
        width = self.folder.config("unet")["cross_attention_dim"]
        conditioning = Sd15Conditioning(torch.randn(batch, CLIP_TOKENS, width, generator=generator))
        return conditioning.to(next(self.network.parameters()).device)
