"""Stable Diffusion XL, read from a local diffusers folder.

Images are made as if cut from originals of their own size: the network's size and crop inputs are
(height, width, 0, 0, height, width), as in the pipeline unless told otherwise. The refiner is
another model and not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline, UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.diffusers_folder import PipelineParts
from unirl.models.unet import CLIP_TOKENS, SCHEDULERS, UNetModel

NUM_TIME_IDS = 6
"""Height and width of the original, top and left of the crop, height and width of the target."""


@dataclass(frozen=True)
class SdxlConditioning(Conditioning):
    """What the network is told about B samples."""

    prompt_embeds: Tensor
    """[B, 77, D] tokens of both CLIPs, side by side."""
    pooled: Tensor
    """[B, P] the second CLIP's pooled vector."""
    time_ids: Tensor
    """[B, 6] float32, see NUM_TIME_IDS."""


class StableDiffusionXLModel(UNetModel):
    """The UNet, two CLIPs and the VAE."""

    parts: ClassVar = PipelineParts(
        family="sdxl",
        pipelines={"StableDiffusionXLPipeline": StableDiffusionXLPipeline},
        networks={"unet": UNet2DConditionModel},
        modules={
            "vae": AutoencoderKL,
            "text_encoder": CLIPTextModel,
            "text_encoder_2": CLIPTextModelWithProjection,
        },
        processors={"tokenizer": CLIPTokenizer, "tokenizer_2": CLIPTokenizer},
        schedulers=SCHEDULERS,
        fixed={"add_watermarker": False},
    )

    @torch.no_grad()
    def encode(self, prompts: Sequence[PromptRecord], sampling: SamplingParams) -> SdxlConditioning:
        """By the pipeline's own method: both CLIPs read 77 tokens of a prompt."""
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            [prompt.text for prompt in prompts],
            device=self.pipeline.text_encoder.device,
            do_classifier_free_guidance=False,
        )
        return SdxlConditioning(embeds, pooled, size_ids(len(prompts), sampling).to(embeds.device))

    def encode_negative(
        self, prompts: Sequence[PromptRecord], sampling: SamplingParams
    ) -> SdxlConditioning | None:
        """The empty text, or zeros where the folder says force_zeros_for_empty_prompt."""
        empty = super().encode_negative(prompts, sampling)
        if empty is None:
            return None
        assert isinstance(empty, SdxlConditioning)
        if not self.pipeline.config["force_zeros_for_empty_prompt"]:
            return empty
        zeros = torch.zeros_like(empty.prompt_embeds), torch.zeros_like(empty.pooled)
        return SdxlConditioning(*zeros, empty.time_ids)

    def prediction(self, x: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, SdxlConditioning)
        return self.network(
            x,
            timesteps,
            encoder_hidden_states=conditioning.prompt_embeds.float(),
            added_cond_kwargs={
                "text_embeds": conditioning.pooled.float(),
                "time_ids": conditioning.time_ids,
            },
            return_dict=False,
        )[0]

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> SdxlConditioning:
        config = self.folder.config("unet")
        size_inputs = NUM_TIME_IDS * config["addition_time_embed_dim"]
        pooled = config["projection_class_embeddings_input_dim"] - size_inputs
        conditioning = SdxlConditioning(
            torch.randn(batch, CLIP_TOKENS, config["cross_attention_dim"], generator=generator),
            torch.randn(batch, pooled, generator=generator),
            size_ids(batch, sampling),
        )
        return conditioning.to(next(self.network.parameters()).device)


def size_ids(batch: int, sampling: SamplingParams) -> Tensor:
    """[batch, 6] of whole images."""
    size = (sampling.height, sampling.width)
    return torch.tensor([[*size, 0, 0, *size]], dtype=torch.float32).repeat(batch, 1)
