"""Sana and Sana 1.5, read from a local diffusers folder.

A transformer with linear attention on latents at 1/32 of the picture; prompts are read by Gemma 2
behind the pipeline's instruction to embellish them. Guidance is classifier-free in one batch. The
published folders come with DPM-Solver, so sampling.solver=dpmpp_2m is what they are deployed with.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from diffusers import (
    AutoencoderDC,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
)
from torch import Tensor
from transformers import Gemma2Model, GemmaTokenizer

from unirl.core.errors import ModelError
from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.diffusers_folder import PipelineParts
from unirl.models.flow_match import scheduler_sigmas, whole_timesteps
from unirl.models.pipeline_model import PipelineModel

INSTRUCTION: list[str] = (
    inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
)
"""What Gemma is told before each prompt, but not before the empty one of guidance."""


@dataclass(frozen=True)
class SanaConditioning(Conditioning):
    """What Gemma says about B prompts."""

    prompt_embeds: Tensor
    """[B, max_sequence_length, D] its states of the first token and of the prompt's end."""
    mask: Tensor
    """[B, max_sequence_length] int64, 1 where there is a token."""


class SanaModel(PipelineModel):
    """The linear-attention transformer, Gemma 2 and the deep-compression autoencoder."""

    parts: ClassVar = PipelineParts(
        family="sana",
        pipelines={"SanaPipeline": SanaPipeline},
        networks={"transformer": SanaTransformer2DModel},
        modules={"vae": AutoencoderDC, "text_encoder": Gemma2Model},
        processors={"tokenizer": GemmaTokenizer},
        schedulers={
            "DPMSolverMultistepScheduler": DPMSolverMultistepScheduler,
            "FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler,
        },
    )

    def encode(self, prompts: Sequence[PromptRecord], sampling: SamplingParams) -> SanaConditioning:
        """By the pipeline's own method, which lowers the letters; max_sequence_length tokens."""
        return self._encoded([prompt.text for prompt in prompts], INSTRUCTION)

    def encode_negative(
        self, prompts: Sequence[PromptRecord], sampling: SamplingParams
    ) -> SanaConditioning | None:
        """The empty text, without the instruction."""
        if sampling.guidance_scale <= 1:
            return None
        empty = self._encoded([""], None)
        return empty.select(torch.zeros(len(prompts), dtype=torch.int64))

    @torch.no_grad()
    def _encoded(self, texts: list[str], instruction: list[str] | None) -> SanaConditioning:
        embeds, mask, _, _ = self.pipeline.encode_prompt(
            prompt=texts,
            do_classifier_free_guidance=False,
            device=self.pipeline.text_encoder.device,
            max_sequence_length=self.settings.max_sequence_length,
            complex_human_instruction=instruction,
        )
        return SanaConditioning(embeds, mask)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, SanaConditioning)
        config = self.folder.config("transformer")
        with self.arithmetic(latents):
            (velocity,) = self.network(
                latents,
                encoder_hidden_states=conditioning.prompt_embeds.float(),
                encoder_attention_mask=conditioning.mask,
                timestep=self._timesteps(sigma) * config.get("timestep_scale", 1.0),
                return_dict=False,
            )
        return velocity.float()

    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        vae = self.pipeline.vae
        scaled = latents.to(vae.dtype) / vae.config["scaling_factor"]
        decoded = vae.decode(scaled, return_dict=False)[0]
        return self.pipeline.image_processor.postprocess(decoded, output_type="pt").float()

    @torch.no_grad()
    def latents_of(self, images: Tensor) -> Tensor:
        vae = self.pipeline.vae
        scaled = (images.to(vae.device).float() / 127.5 - 1).to(vae.dtype)
        return (vae.encode(scaled).latent * vae.config["scaling_factor"]).float()

    def latent_shape(self, sampling: SamplingParams) -> tuple[int, ...]:
        config = self.folder.config("transformer")
        factor = 2 ** (len(self.folder.config("vae")["encoder_block_out_channels"]) - 1)
        multiple = factor * config["patch_size"]
        self.require_multiple(
            sampling, multiple, f"VAE factor {factor} x patch {config['patch_size']}"
        )
        return (config["in_channels"], sampling.height // factor, sampling.width // factor)

    def sigmas(self, sampling: SamplingParams) -> tuple[float, ...]:
        """What the pipeline's `set_timesteps(num_steps)` gives with the folder's scheduler.

        DPM-Solver's levels begin at 0.9997 with a flow_shift of 3. Raises ModelError for one that
        is not set to flows.
        """
        num_steps = sampling.num_inference_steps
        if isinstance(self.scheduler, FlowMatchEulerDiscreteScheduler):
            return scheduler_sigmas(self.scheduler, num_steps)
        config = self.scheduler.config
        if not config["use_flow_sigmas"] or config["prediction_type"] != "flow_prediction":
            raise ModelError(
                f"model.path={self.folder.path}: its DPM-Solver has use_flow_sigmas="
                f"{config['use_flow_sigmas']} and prediction_type={config['prediction_type']}, but "
                "Sana is a flow. Set them to true and flow_prediction in scheduler_config.json."
            )
        self.scheduler.set_timesteps(num_steps)
        return tuple(self.scheduler.sigmas.tolist())

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> SanaConditioning:
        config, length = self.folder.config("transformer"), self.settings.max_sequence_length
        conditioning = SanaConditioning(
            torch.randn(batch, length, config["caption_channels"], generator=generator),
            torch.ones(batch, length, dtype=torch.int64),
        )
        return conditioning.to(next(self.network.parameters()).device)

    def _timesteps(self, sigma: Tensor) -> Tensor:
        """[B] what the scheduler would tell the network at these levels."""
        num_timesteps = self.scheduler.config["num_train_timesteps"]
        if isinstance(self.scheduler, FlowMatchEulerDiscreteScheduler):
            return sigma * num_timesteps
        return whole_timesteps(sigma, num_timesteps)
