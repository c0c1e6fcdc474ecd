"""FLUX.1 dev and schnell, read from a local diffusers folder.

Latents are kept as [16, H/8, W/8] and packed into tokens of 2 x 2 inside `velocity`. dev takes
guidance as an input of the network: `sampling.guidance_scale` is that input and costs no second
answer. schnell takes none, so its guidance_scale must be 1 or less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.diffusers_folder import PipelineParts
from unirl.models.flow_match import linear_grid, resolution_shift, scheduler_sigmas
from unirl.models.pipeline_model import PipelineModel

PATCH = 2
"""Latent pixels a token is wide and high."""


@dataclass(frozen=True)
class FluxConditioning(Conditioning):
    """What the network is told about B samples."""

    prompt_embeds: Tensor
    """[B, max_sequence_length, D] T5 tokens."""
    pooled: Tensor
    """[B, P] CLIP's pooled vector."""
    guidance: Tensor
    """[B] float32 sampling.guidance_scale; read by guidance-distilled networks only."""


class FluxModel(PipelineModel):
    """The two-stream transformer, CLIP-L, T5 and the VAE."""

    parts: ClassVar = PipelineParts(
        family="flux",
        pipelines={"FluxPipeline": FluxPipeline},
        networks={"transformer": FluxTransformer2DModel},
        modules={
            "vae": AutoencoderKL,
            "text_encoder": CLIPTextModel,
            "text_encoder_2": T5EncoderModel,
        },
        processors={"tokenizer": CLIPTokenizer, "tokenizer_2": T5Tokenizer},
        schedulers={"FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler},
    )

    @torch.no_grad()
    def encode(self, prompts: Sequence[PromptRecord], sampling: SamplingParams) -> FluxConditioning:
        """By the pipeline's own method: CLIP reads 77 tokens, T5 max_sequence_length."""
        prompt_embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt=[prompt.text for prompt in prompts],
            prompt_2=None,
            device=self.pipeline.text_encoder.device,
            max_sequence_length=self.settings.max_sequence_length,
        )
        guidance = torch.full((len(prompts),), sampling.guidance_scale, device=pooled.device)
        return FluxConditioning(prompt_embeds, pooled, guidance)

    def needs_negative(self, sampling: SamplingParams) -> bool:
        """False: guidance is an input of the network."""
        return False

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, FluxConditioning)
        embeds = conditioning.prompt_embeds.float()
        _, _, height, width = latents.shape
        with self.arithmetic(latents):
            (velocity,) = self.network(
                hidden_states=packed(latents),
                timestep=sigma,
                guidance=conditioning.guidance if self._is_guided else None,
                pooled_projections=conditioning.pooled.float(),
                encoder_hidden_states=embeds,
                txt_ids=embeds.new_zeros(embeds.shape[1], 3),
                img_ids=token_places(height // PATCH, width // PATCH, latents.device),
                return_dict=False,
            )
        return unpacked(velocity.float(), height, width)

    def pixels(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        scaled = latents / vae.config["scaling_factor"] + vae.config["shift_factor"]
        decoded = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return self.pipeline.image_processor.postprocess(decoded, output_type="pt").float()

    @torch.no_grad()
    def latents_of(self, images: Tensor) -> Tensor:
        vae = self.pipeline.vae
        scaled = (images.to(vae.device).float() / 127.5 - 1).to(vae.dtype)
        # The mean of the encoder's distribution: the same image gives the same latents.
        mean = vae.encode(scaled).latent_dist.mode()
        return ((mean - vae.config["shift_factor"]) * vae.config["scaling_factor"]).float()

    def latent_shape(self, sampling: SamplingParams) -> tuple[int, ...]:
        """Raises ModelError for a size that is no whole number of tokens, and for guidance that
        the network does not take."""
        if not self._is_guided:
            self.require_no_guidance(sampling)
        factor = 2 ** (len(self.folder.config("vae")["block_out_channels"]) - 1)
        self.require_multiple(sampling, factor * PATCH, f"VAE factor {factor} x patch {PATCH}")
        channels = self.folder.config("transformer")["in_channels"] // PATCH**2
        return (channels, sampling.height // factor, sampling.width // factor)

    def sigmas(self, sampling: SamplingParams) -> tuple[float, ...]:
        """The pipeline's own: T equal levels, shifted by the number of image tokens where the
        scheduler's config says so (dev), else by its static shift."""
        _, height, width = self.latent_shape(sampling)
        num_tokens = (height // PATCH) * (width // PATCH)
        return scheduler_sigmas(
            self.scheduler,
            sampling.num_inference_steps,
            mu=resolution_shift(self.scheduler.config, num_tokens),
            grid=linear_grid(sampling.num_inference_steps),
        )

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> FluxConditioning:
        config, length = self.folder.config("transformer"), self.settings.max_sequence_length
        conditioning = FluxConditioning(
            torch.randn(batch, length, config["joint_attention_dim"], generator=generator),
            torch.randn(batch, config["pooled_projection_dim"], generator=generator),
            torch.full((batch,), sampling.guidance_scale),
        )
        return conditioning.to(next(self.network.parameters()).device)

    @property
    def _is_guided(self) -> bool:
        """Whether the network was distilled to take guidance as an input."""
        return self.folder.config("transformer")["guidance_embeds"]


def packed(latents: Tensor) -> Tensor:
    """[B, C, h, w] -> [B, h w / 4, 4 C]: squares of 2 x 2 become tokens."""
    return F.pixel_unshuffle(latents, PATCH).flatten(2).transpose(1, 2)


def unpacked(tokens: Tensor, height: int, width: int) -> Tensor:
    """[B, h w / 4, 4 C] -> [B, C, height, width]."""
    rows = tokens.transpose(1, 2).unflatten(2, (height // PATCH, width // PATCH))
    return F.pixel_shuffle(rows, PATCH)


def token_places(rows: int, columns: int, device: torch.device) -> Tensor:
    """[rows * columns, 3] (0, row, column) of each token, for the rotary embedding."""
    grid = torch.cartesian_prod(
        torch.arange(1.0, device=device),
        torch.arange(float(rows), device=device),
        torch.arange(float(columns), device=device),
    )
    return grid.view(-1, 3)
