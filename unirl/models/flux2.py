"""FLUX.2 dev and klein, read from a local diffusers folder.

Latents are kept as the network takes them: squares of 2 x 2 of the VAE's pixels side by side,
[128, H/16, W/16], each channel with mean 0 and variance 1. Both models read three hidden layers of
a language model, dev Mistral's and klein Qwen3's. dev takes guidance as an input of the network,
klein by a second answer; a distilled klein takes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from torch import Tensor
from transformers import (
    AutoTokenizer,
    Mistral3ForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3ForCausalLM,
)

from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.diffusers_folder import PipelineParts
from unirl.models.flow_match import linear_grid, scheduler_sigmas
from unirl.models.pipeline_model import PipelineModel

PATCH = 2
"""Pixels of the VAE's latents that a token is wide and high."""


@dataclass(frozen=True)
class Flux2Conditioning(Conditioning):
    """What the network is told about B samples."""

    prompt_embeds: Tensor
    """[B, max_sequence_length, D] three hidden layers of the language model side by side."""
    guidance: Tensor
    """[B] float32 sampling.guidance_scale; read by dev's network only."""


class Flux2Family(PipelineModel):
    """What dev and klein share: all but the language model and the kind of guidance."""

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[PromptRecord], sampling: SamplingParams
    ) -> Flux2Conditioning:
        """By the pipeline's own method; max_sequence_length counts the chat template's tokens, and
        padding is read like any other token."""
        embeds, _ = self.pipeline.encode_prompt(
            prompt=[prompt.text for prompt in prompts],
            device=self.pipeline.text_encoder.device,
            max_sequence_length=self.settings.max_sequence_length,
        )
        guidance = torch.full((len(prompts),), sampling.guidance_scale, device=embeds.device)
        return Flux2Conditioning(embeds, guidance)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, Flux2Conditioning)
        embeds = conditioning.prompt_embeds.float()
        _, _, rows, columns = latents.shape
        with self.arithmetic(latents):
            (velocity,) = self.network(
                hidden_states=latents.flatten(2).transpose(1, 2),
                timestep=sigma,
                guidance=conditioning.guidance if self._is_guided else None,
                encoder_hidden_states=embeds,
                txt_ids=_places(1, 1, embeds.shape[1], latents.device),
                img_ids=_places(rows, columns, 1, latents.device),
                return_dict=False,
            )
        return velocity.float().transpose(1, 2).unflatten(2, (rows, columns))

    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        vae = self.pipeline.vae
        mean, std = self._latent_statistics()
        decoded = vae.decode(
            F.pixel_shuffle(latents * std + mean, PATCH).to(vae.dtype), return_dict=False
        )[0]
        return self.pipeline.image_processor.postprocess(decoded, output_type="pt").float()

    @torch.no_grad()
    def latents_of(self, images: Tensor) -> Tensor:
        vae = self.pipeline.vae
        scaled = (images.to(vae.device).float() / 127.5 - 1).to(vae.dtype)
        # The mean of the encoder's distribution: the same image gives the same latents.
        patches = F.pixel_unshuffle(vae.encode(scaled).latent_dist.mode().float(), PATCH)
        mean, std = self._latent_statistics()
        return (patches - mean) / std

    def latent_shape(self, sampling: SamplingParams) -> tuple[int, ...]:
        """Raises ModelError for a size that is no whole number of tokens, and for guidance that
        the network does not take."""
        if not self._takes_guidance:
            self.require_no_guidance(sampling)
        factor = 2 ** (len(self.folder.config("vae")["block_out_channels"]) - 1)
        self.require_multiple(sampling, factor * PATCH, f"VAE factor {factor} x patch {PATCH}")
        multiple = factor * PATCH
        channels = self.folder.config("transformer")["in_channels"]
        return (channels, sampling.height // multiple, sampling.width // multiple)

    def sigmas(self, sampling: SamplingParams) -> tuple[float, ...]:
        """The pipeline's own: T equal levels, shifted by the number of tokens and of steps."""
        _, rows, columns = self.latent_shape(sampling)
        num_steps = sampling.num_inference_steps
        mu = compute_empirical_mu(rows * columns, num_steps)
        return scheduler_sigmas(self.scheduler, num_steps, mu=mu, grid=linear_grid(num_steps))

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> Flux2Conditioning:
        width = self.folder.config("transformer")["joint_attention_dim"]
        conditioning = Flux2Conditioning(
            torch.randn(batch, self.settings.max_sequence_length, width, generator=generator),
            torch.full((batch,), sampling.guidance_scale),
        )
        return conditioning.to(next(self.network.parameters()).device)

    def _latent_statistics(self) -> tuple[Tensor, Tensor]:
        """[1, 128, 1, 1] mean and standard deviation of the VAE's patches, float32."""
        vae = self.pipeline.vae
        mean, variance = (s.float().view(1, -1, 1, 1) for s in vae.bn.buffers() if s.ndim)
        return mean, (variance + vae.config["batch_norm_eps"]).sqrt()

    @property
    def _is_guided(self) -> bool:
        """Whether the network was distilled to take guidance as an input."""
        return self.folder.config("transformer")["guidance_embeds"]

    @property
    def _takes_guidance(self) -> bool:
        return self._is_guided


class Flux2Model(Flux2Family):
    """FLUX.2 dev: Mistral3, guidance as an input.

    Of the folder's processor only the tokenizer is read: prompts are texts.
    """

    parts: ClassVar = PipelineParts(
        family="flux2",
        pipelines={"Flux2Pipeline": Flux2Pipeline},
        networks={"transformer": Flux2Transformer2DModel},
        modules={"vae": AutoencoderKLFlux2, "text_encoder": Mistral3ForConditionalGeneration},
        processors={"tokenizer": AutoTokenizer},
        schedulers={"FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler},
    )

    def needs_negative(self, sampling: SamplingParams) -> bool:
        """False: guidance is an input of the network."""
        return False


class Flux2KleinModel(Flux2Family):
    """FLUX.2 klein: Qwen3; classifier-free guidance, but for distilled weights."""

    parts: ClassVar = PipelineParts(
        family="flux2_klein",
        pipelines={"Flux2KleinPipeline": Flux2KleinPipeline},
        networks={"transformer": Flux2Transformer2DModel},
        modules={"vae": AutoencoderKLFlux2, "text_encoder": Qwen3ForCausalLM},
        processors={"tokenizer": Qwen2Tokenizer},
        schedulers={"FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler},
    )

    @property
    def _takes_guidance(self) -> bool:
        """Unless model_index.json says `is_distilled`."""
        return not self.folder.settings.get("is_distilled", False)


def _places(rows: int, columns: int, length: int, device: torch.device) -> Tensor:
    """[rows * columns * length, 4] (0, row, column, position) of tokens, for the rotary embedding.

    Tokens of the image have position 0, those of the text row and column 0.
    """
    axes = (1, rows, columns, length)
    return torch.cartesian_prod(*(torch.arange(float(axis), device=device) for axis in axes))
