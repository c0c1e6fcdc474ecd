"""Stable Diffusion 3 and 3.5, read from a local diffusers folder.

Encoding, schedule and image conversion are the diffusers pipeline's own, so an ODE rollout here is
the picture the deployed pipeline would give. A folder whose `text_encoder_3` is null runs without
T5, as the pipeline does.

    settings = LoadSettings(
        frozen_dtype=torch.bfloat16, compute_dtype=torch.bfloat16,
        max_sequence_length=256, frozen=Frozen.ALL,
    )
    model = StableDiffusion3Model.load(Path("stable-diffusion-3.5-medium"), settings)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from unirl.core.errors import ModelError
from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.diffusers_folder import PipelineParts
from unirl.models.flow_match import resolution_shift, scheduler_sigmas
from unirl.models.pipeline_model import PipelineModel

CLIP_TOKENS = 77
"""Length every CLIP prompt is padded to; the T5 tokens follow it."""


@dataclass(frozen=True)
class Sd3Conditioning(Conditioning):
    """What the three text encoders say about B prompts."""

    prompt_embeds: Tensor
    """[B, 77 + max_sequence_length, D] CLIP tokens, then T5 tokens (zeros without a T5)."""
    pooled: Tensor
    """[B, P] both CLIPs' pooled vectors."""


class StableDiffusion3Model(PipelineModel):
    """The MMDiT, its text encoders and its VAE."""

    parts: ClassVar = PipelineParts(
        family="sd3",
        pipelines={"StableDiffusion3Pipeline": StableDiffusion3Pipeline},
        networks={"transformer": SD3Transformer2DModel},
        modules={
            "vae": AutoencoderKL,
            "text_encoder": CLIPTextModelWithProjection,
            "text_encoder_2": CLIPTextModelWithProjection,
            "text_encoder_3": T5EncoderModel,
        },
        processors={
            "tokenizer": CLIPTokenizer,
            "tokenizer_2": CLIPTokenizer,
            "tokenizer_3": T5Tokenizer,
        },
        schedulers={"FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler},
        optional=("text_encoder_3", "tokenizer_3"),
    )

    @torch.no_grad()
    def encode(self, prompts: Sequence[PromptRecord], sampling: SamplingParams) -> Sd3Conditioning:
        """In frozen_dtype on the text encoders' device, by the pipeline's own method.

        CLIP reads the first 77 tokens of a prompt, T5 the first max_sequence_length.
        """
        prompt_embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=[prompt.text for prompt in prompts],
            prompt_2=None,  # None: the same prompt for every encoder
            prompt_3=None,
            device=self.pipeline.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.settings.max_sequence_length,
        )
        return Sd3Conditioning(prompt_embeds, pooled)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, Sd3Conditioning)
        with self.arithmetic(latents):
            # The embeddings may be bf16 beside a float32 network; widening them is exact.
            (velocity,) = self.network(
                hidden_states=latents,
                timestep=sigma * self.scheduler.config["num_train_timesteps"],
                encoder_hidden_states=conditioning.prompt_embeds.float(),
                pooled_projections=conditioning.pooled.float(),
                return_dict=False,
            )
        return velocity.float()

    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
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
        """Raises ModelError for a size the network's patches or position table do not cover."""
        config, factor = self.folder.config("transformer"), self._vae_scale_factor
        multiple = factor * config["patch_size"]
        largest = multiple * config["pos_embed_max_size"]
        self.require_multiple(
            sampling, multiple, f"VAE factor {factor} x patch {config['patch_size']}"
        )
        if max(sampling.height, sampling.width) > largest:
            raise ModelError(
                f"sampling.height={sampling.height}, sampling.width={sampling.width}: this model "
                f"takes up to {largest} pixels. Change sampling.height and sampling.width."
            )
        return (config["in_channels"], sampling.height // factor, sampling.width // factor)

    def sigmas(self, sampling: SamplingParams) -> tuple[float, ...]:
        """What the pipeline's `set_timesteps(num_steps)` gives with the folder's scheduler.

        A static shift acts twice there, on the range of the grid and on the grid, so the last step
        is very short (docs/models/sd3.md has the numbers).
        """
        mu = None
        if self.scheduler.config["use_dynamic_shifting"]:
            _, height, width = self.latent_shape(sampling)
            patch = self.folder.config("transformer")["patch_size"]
            mu = resolution_shift(self.scheduler.config, (height // patch) * (width // patch))
        return scheduler_sigmas(self.scheduler, sampling.num_inference_steps, mu=mu)

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> Sd3Conditioning:
        config = self.folder.config("transformer")
        tokens = CLIP_TOKENS + self.settings.max_sequence_length
        conditioning = Sd3Conditioning(
            torch.randn(batch, tokens, config["joint_attention_dim"], generator=generator),
            torch.randn(batch, config["pooled_projection_dim"], generator=generator),
        )
        return conditioning.to(next(self.network.parameters()).device)

    @property
    def _vae_scale_factor(self) -> int:
        return 2 ** (len(self.folder.config("vae")["block_out_channels"]) - 1)
