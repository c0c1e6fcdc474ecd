"""Z-Image and Z-Image-Turbo, read from a local diffusers folder.

The network takes a list of images [16, 1, H/8, W/8] and a list of texts of their own lengths; its
time runs from 0 at pure noise to 1, and its answer points from noise to image.

Guidance is cond + s (cond - uncond): a scale s here is a scale of s + 1 in other families, 0 is
off, and 1 is not. The pipeline's cfg_normalization and cfg_truncation are off, as by default there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2Tokenizer, Qwen3Model

from unirl.core.errors import ModelError
from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.diffusers_folder import PipelineParts
from unirl.models.flow_match import resolution_shift, scheduler_sigmas
from unirl.models.pipeline_model import PipelineModel

PATCH = 2
"""Latent pixels a token is wide and high."""


@dataclass(frozen=True)
class ZImageConditioning(Conditioning):
    """What the language model says about B prompts."""

    prompt_embeds: Tensor
    """[B, L, D] its last hidden layer but one, zeros behind the prompt's end."""
    mask: Tensor
    """[B, L] bool, True where there is a token. L differs from batch to batch."""


class ZImageModel(PipelineModel):
    """The single-stream transformer, Qwen3 and FLUX.1's VAE."""

    parts: ClassVar = PipelineParts(
        family="z_image",
        pipelines={"ZImagePipeline": ZImagePipeline},
        networks={"transformer": ZImageTransformer2DModel},
        modules={"vae": AutoencoderKL, "text_encoder": Qwen3Model},
        processors={"tokenizer": Qwen2Tokenizer},
        schedulers={"FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler},
    )

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[PromptRecord], sampling: SamplingParams
    ) -> ZImageConditioning:
        """By the pipeline's own method; max_sequence_length counts the chat template's tokens."""
        texts, _ = self.pipeline.encode_prompt(
            prompt=[prompt.text for prompt in prompts],
            device=self.pipeline.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.settings.max_sequence_length,
        )
        masks = [text.new_ones(len(text), dtype=torch.bool) for text in texts]
        return ZImageConditioning(
            pad_sequence(texts, batch_first=True), pad_sequence(masks, batch_first=True)
        )

    def needs_negative(self, sampling: SamplingParams) -> bool:
        """True at every scale but 0."""
        return sampling.guidance_scale > 0

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, ZImageConditioning)
        pairs = zip(conditioning.prompt_embeds.float(), conditioning.mask, strict=True)
        with self.arithmetic(latents):
            (answers,) = self.network(
                list(latents.unsqueeze(2).unbind()),
                1 - sigma,
                [embeds[mask] for embeds, mask in pairs],
                return_dict=False,
            )
        return -torch.stack(answers).squeeze(2).float()

    def guided_velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        sampling: SamplingParams,
    ) -> Tensor:
        """v_cond + s (v_cond - v_uncond), in one batch with the conditional half first."""
        if negative is None:
            return self.velocity(latents, sigma, conditioning)
        both = ZImageConditioning.cat([conditioning, negative])  # type: ignore[list-item]
        pair = self.velocity(torch.cat([latents, latents]), torch.cat([sigma, sigma]), both)
        conditional, unconditional = pair.chunk(2)
        return conditional + sampling.guidance_scale * (conditional - unconditional)

    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        vae = self.pipeline.vae
        scaled = latents.to(vae.dtype) / vae.config["scaling_factor"] + vae.config["shift_factor"]
        decoded = vae.decode(scaled, return_dict=False)[0]
        return self.pipeline.image_processor.postprocess(decoded, output_type="pt").float()

    @torch.no_grad()
    def latents_of(self, images: Tensor) -> Tensor:
        vae = self.pipeline.vae
        scaled = (images.to(vae.device).float() / 127.5 - 1).to(vae.dtype)
        # The mean of the encoder's distribution: the same image gives the same latents.
        mean = vae.encode(scaled).latent_dist.mode()
        return ((mean - vae.config["shift_factor"]) * vae.config["scaling_factor"]).float()

    def latent_shape(self, sampling: SamplingParams) -> tuple[int, ...]:
        """Raises ModelError for a size that is no whole number of tokens, or has more of them than
        the network knows places."""
        config = self.folder.config("transformer")
        factor = 2 ** (len(self.folder.config("vae")["block_out_channels"]) - 1)
        self.require_multiple(sampling, factor * PATCH, f"VAE factor {factor} x patch {PATCH}")
        _, *places = config["axes_lens"]
        largest = [factor * PATCH * number for number in places]
        if sampling.height > largest[0] or sampling.width > largest[1]:
            raise ModelError(
                f"sampling.height={sampling.height}, sampling.width={sampling.width}: this model "
                f"takes up to {largest[0]} x {largest[1]}. Change sampling.height and "
                "sampling.width."
            )
        return (config["in_channels"], sampling.height // factor, sampling.width // factor)

    def sigmas(self, sampling: SamplingParams) -> tuple[float, ...]:
        """The pipeline's own: T equal levels, moved by the scheduler's static shift, or by the
        number of image tokens where its config says so."""
        _, height, width = self.latent_shape(sampling)
        num_steps = sampling.num_inference_steps
        return scheduler_sigmas(
            self.scheduler,
            num_steps,
            mu=resolution_shift(self.scheduler.config, (height // PATCH) * (width // PATCH)),
            grid=torch.linspace(1.0, 1 / num_steps, num_steps).tolist(),
        )

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> ZImageConditioning:
        length = self.settings.max_sequence_length
        width = self.folder.config("transformer")["cap_feat_dim"]
        conditioning = ZImageConditioning(
            torch.randn(batch, length, width, generator=generator),
            torch.ones(batch, length, dtype=torch.bool),
        )
        return conditioning.to(next(self.network.parameters()).device)
