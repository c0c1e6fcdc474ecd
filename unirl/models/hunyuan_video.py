"""HunyuanVideo, text to video, read from a local diffusers folder.

Latents are [16, 1 + (F - 1) / 4, H / 8, W / 8]. Guidance was distilled into the network:
`sampling.guidance_scale` is its input and costs no second answer. The decoder is normalised over
all frames, so the first one cannot be decoded alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer, LlamaModel

from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.diffusers_folder import PipelineParts, RulesInFile
from unirl.models.flow_match import linear_grid, scheduler_sigmas
from unirl.models.pipeline_model import PipelineModel
from unirl.models.video_frames import decoded_one_by_one, num_latent_frames, video_pixels


@dataclass(frozen=True)
class HunyuanVideoConditioning(Conditioning):
    """What the network is told about B samples."""

    prompt_embeds: Tensor
    """[B, max_sequence_length, D] Llama's tokens behind the template's opening."""
    mask: Tensor
    """[B, max_sequence_length] 1 where there is a token, else 0."""
    pooled: Tensor
    """[B, P] CLIP's pooled vector."""
    guidance: Tensor
    """[B] float32 sampling.guidance_scale; read by guidance-distilled networks only."""


class HunyuanVideoModel(PipelineModel):
    """The two-stream video transformer, Llama, CLIP-L and the causal VAE."""

    parts: ClassVar = PipelineParts(
        family="hunyuan_video",
        pipelines={"HunyuanVideoPipeline": HunyuanVideoPipeline},
        networks={"transformer": HunyuanVideoTransformer3DModel},
        modules={
            "vae": AutoencoderKLHunyuanVideo,
            "text_encoder": LlamaModel,
            "text_encoder_2": CLIPTextModel,
        },
        # Llama 3 reads bytes; transformers' LlamaTokenizer would read them as Llama 2 does.
        processors={"tokenizer": RulesInFile, "tokenizer_2": CLIPTokenizer},
        schedulers={"FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler},
    )

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[PromptRecord], sampling: SamplingParams
    ) -> HunyuanVideoConditioning:
        """By the pipeline's own method, with its template that asks for a video's description."""
        embeds, pooled, mask = self.pipeline.encode_prompt(
            prompt=[prompt.text for prompt in prompts],
            device=self.pipeline.text_encoder.device,
            max_sequence_length=self.settings.max_sequence_length,
        )
        guidance = torch.full((len(prompts),), sampling.guidance_scale, device=pooled.device)
        return HunyuanVideoConditioning(embeds, mask, pooled, guidance)

    def encode_negative(self, prompts: Sequence[PromptRecord], sampling: SamplingParams) -> None:
        """None: guidance is an input of the network."""
        return

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, HunyuanVideoConditioning)
        with self.arithmetic(latents):
            (velocity,) = self.network(
                hidden_states=latents,
                timestep=sigma * self.scheduler.config["num_train_timesteps"],
                # The embeddings may be bf16 beside a float32 network; widening them is exact.
                encoder_hidden_states=conditioning.prompt_embeds.float(),
                encoder_attention_mask=conditioning.mask.float(),
                pooled_projections=conditioning.pooled.float(),
                guidance=conditioning.guidance * 1000 if self._is_guided else None,
                return_dict=False,
            )
        return velocity.float()

    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        return video_pixels(
            self._frames, latents, sampling.decoded_frames, first_frame_stands_alone=False
        )

    @torch.no_grad()
    def decode(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        return decoded_one_by_one(self.pixels, latents, sampling)

    @torch.no_grad()
    def latents_of(self, images: Tensor) -> Tensor:
        """Of videos [B, F, 3, H, W] uint8."""
        vae = self.pipeline.vae
        video = images.to(vae.device).float().transpose(1, 2) / 127.5 - 1
        # The mean of the encoder's distribution: the same video gives the same latents.
        mode = vae.encode(video.to(vae.dtype)).latent_dist.mode()
        return (mode * vae.config["scaling_factor"]).float()

    def latent_shape(self, sampling: SamplingParams) -> tuple[int, ...]:
        if not self._is_guided:
            self.require_no_guidance(sampling)
        config, patch = self.folder.config("vae"), self.folder.config("transformer")["patch_size"]
        factor = config["spatial_compression_ratio"]
        self.require_multiple(sampling, factor * patch, f"VAE factor {factor} x patch {patch}")
        num_frames = num_latent_frames(sampling, config["temporal_compression_ratio"])
        height, width = sampling.height // factor, sampling.width // factor
        return (config["latent_channels"], num_frames, height, width)

    def sigmas(self, sampling: SamplingParams) -> tuple[float, ...]:
        """The pipeline's own: T equal levels, shifted by the scheduler's shift."""
        num_steps = sampling.num_inference_steps
        return scheduler_sigmas(self.scheduler, num_steps, grid=linear_grid(num_steps))

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> HunyuanVideoConditioning:
        config, length = self.folder.config("transformer"), self.settings.max_sequence_length
        conditioning = HunyuanVideoConditioning(
            torch.randn(batch, length, config["text_embed_dim"], generator=generator),
            torch.ones(batch, length, dtype=torch.int64),
            torch.randn(batch, config["pooled_projection_dim"], generator=generator),
            torch.full((batch,), sampling.guidance_scale),
        )
        return conditioning.to(next(self.network.parameters()).device)

    def _frames(self, latents: Tensor) -> Tensor:
        """[B, F, 3, H, W] in [0, 1]."""
        vae = self.pipeline.vae
        scaled = latents.to(vae.dtype) / vae.config["scaling_factor"]
        decoded = vae.decode(scaled, return_dict=False)[0]
        return self.pipeline.video_processor.postprocess_video(decoded, output_type="pt").float()

    @property
    def _is_guided(self) -> bool:
        """Whether the network was distilled to take guidance as an input."""
        return self.folder.config("transformer")["guidance_embeds"]
