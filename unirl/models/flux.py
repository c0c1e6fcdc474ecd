"""FLUX.1 dev and schnell, read from a local diffusers folder, and what Kontext shares with them.

Latents are kept as [16, H/8, W/8] and packed into tokens of 2 x 2 for the network. dev takes
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

MODULES = {
    "vae": AutoencoderKL,
    "text_encoder": CLIPTextModel,
    "text_encoder_2": T5EncoderModel,
}
PROCESSORS = {"tokenizer": CLIPTokenizer, "tokenizer_2": T5Tokenizer}
SCHEDULERS = {"FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler}


@dataclass(frozen=True)
class FluxConditioning(Conditioning):
    """What the network is told about B samples."""

    prompt_embeds: Tensor
    """[B, max_sequence_length, D] T5 tokens."""
    pooled: Tensor
    """[B, P] CLIP's pooled vector."""
    guidance: Tensor
    """[B] float32 sampling.guidance_scale; read by guidance-distilled networks only."""


class FluxFamily(PipelineModel):
    """A family whose network is a FluxTransformer2DModel, with CLIP-L, T5 and FLUX.1's VAE."""

    @torch.no_grad()
    def texts(self, prompts: Sequence[PromptRecord], sampling: SamplingParams) -> FluxConditioning:
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

    def answer(
        self,
        latents: Tensor,
        sigma: Tensor,
        texts: FluxConditioning,
        images: Sequence[Tensor] = (),
    ) -> Tensor:
        """[B, C, h, w] velocity of latents [B, C, h, w], with the clean latents [B, C, h', w'] of
        further images beside them."""
        pictures = [latents, *images]
        shapes = [(p.shape[2] // PATCH, p.shape[3] // PATCH) for p in pictures]
        places = [token_places(n, *shape, latents.device) for n, shape in enumerate(shapes)]
        embeds = texts.prompt_embeds.float()
        with self.arithmetic(latents):
            (velocity,) = self.network(
                hidden_states=torch.cat([packed(picture) for picture in pictures], dim=1),
                timestep=sigma,
                guidance=texts.guidance if self._is_guided else None,
                pooled_projections=texts.pooled.float(),
                encoder_hidden_states=embeds,
                txt_ids=embeds.new_zeros(embeds.shape[1], 3),
                img_ids=torch.cat(places),
                return_dict=False,
            )
        rows, columns = shapes[0]
        own = velocity[:, : rows * columns].float()
        return unpacked(own, rows * PATCH, columns * PATCH)

    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        vae = self.pipeline.vae
        scaled = latents / vae.config["scaling_factor"] + vae.config["shift_factor"]
        decoded = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return self.pipeline.image_processor.postprocess(decoded, output_type="pt").float()

    @torch.no_grad()
    def latents_of(self, images: Tensor) -> Tensor:
        return self.clean_latents(images.to(self.pipeline.vae.device).float() / 127.5 - 1)

    @torch.no_grad()
    def clean_latents(self, scaled: Tensor) -> Tensor:
        """[B, C, h, w] float32 of images [B, 3, H, W] in [-1, 1].

        The mean of the encoder's distribution: the same image gives the same latents.
        """
        vae = self.pipeline.vae
        mean = vae.encode(scaled.to(vae.dtype)).latent_dist.mode()
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

    def example_texts(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> FluxConditioning:
        """Random, on the CPU."""
        config, length = self.folder.config("transformer"), self.settings.max_sequence_length
        return FluxConditioning(
            torch.randn(batch, length, config["joint_attention_dim"], generator=generator),
            torch.randn(batch, config["pooled_projection_dim"], generator=generator),
            torch.full((batch,), sampling.guidance_scale),
        )

    @property
    def _is_guided(self) -> bool:
        """Whether the network was distilled to take guidance as an input."""
        return self.folder.config("transformer")["guidance_embeds"]


class FluxModel(FluxFamily):
    """FLUX.1 dev or schnell: an image of a text."""

    parts: ClassVar = PipelineParts(
        family="flux",
        pipelines={"FluxPipeline": FluxPipeline},
        networks={"transformer": FluxTransformer2DModel},
        modules=MODULES,
        processors=PROCESSORS,
        schedulers=SCHEDULERS,
    )

    def encode(self, prompts: Sequence[PromptRecord], sampling: SamplingParams) -> FluxConditioning:
        return self.texts(prompts, sampling)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, FluxConditioning)
        return self.answer(latents, sigma, conditioning)

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> FluxConditioning:
        conditioning = self.example_texts(batch, sampling, generator)
        return conditioning.to(next(self.network.parameters()).device)


def packed(latents: Tensor) -> Tensor:
    """[B, C, h, w] -> [B, h w / 4, 4 C]: squares of 2 x 2 become tokens."""
    return F.pixel_unshuffle(latents, PATCH).flatten(2).transpose(1, 2)


def unpacked(tokens: Tensor, height: int, width: int) -> Tensor:
    """[B, h w / 4, 4 C] -> [B, C, height, width]."""
    rows = tokens.transpose(1, 2).unflatten(2, (height // PATCH, width // PATCH))
    return F.pixel_shuffle(rows, PATCH)


def token_places(number: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """[rows * columns, 3] (number of the image, row, column) of each token, for the rotary
    embedding."""
    grid = torch.cartesian_prod(
        torch.tensor([float(number)], device=device),
        torch.arange(float(rows), device=device),
        torch.arange(float(columns), device=device),
    )
    return grid.view(-1, 3)
