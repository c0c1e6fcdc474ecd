"""HunyuanVideo 1.5, text to video, read from a local diffusers folder.

Latents are [32, 1 + (F - 1) / 4, H / 16, W / 16]. Qwen2.5-VL reads the prompt, ByT5 the texts in
quotation marks that the video shall show. Guidance asks the network twice, one answer after the
other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from diffusers.loaders import HunyuanVideoLoraLoaderMixin
from torch import Tensor
from transformers import ByT5Tokenizer, Qwen2_5_VLTextModel, Qwen2Tokenizer, T5EncoderModel

from unirl.core.errors import ModelError
from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.base import LoadSettings
from unirl.models.diffusers_folder import DiffusersFolder, PipelineParts
from unirl.models.flow_match import linear_grid, scheduler_sigmas
from unirl.models.lora_export import write_lora
from unirl.models.pipeline_model import PipelineModel
from unirl.models.video_frames import decoded_one_by_one, num_latent_frames, video_pixels
from unirl.samplers.guidance import classifier_free_apart

IMAGE_TOKENS = 729
"""The network has room for so many tokens of an image; without one they are zeros and masked."""
GLYPH_TOKENS = 256
"""Of ByT5, whatever the prompt."""

PLAIN_GUIDANCE: Mapping[str, Any] = {
    "guidance_rescale": 0.0,
    "use_original_formulation": False,
    "start": 0.0,
    "stop": 1.0,
    "enabled": True,
}
"""What a folder's guider must be; its scale is sampling.guidance_scale's business."""


@dataclass(frozen=True)
class HunyuanVideo15Conditioning(Conditioning):
    """What the two text encoders say about B prompts."""

    prompt_embeds: Tensor
    """[B, max_sequence_length, D] Qwen's tokens behind the template's opening."""
    mask: Tensor
    """[B, max_sequence_length] 1 where there is a token, else 0."""
    glyph_embeds: Tensor
    """[B, 256, E] ByT5's bytes of the texts in quotation marks, zeros without any."""
    glyph_mask: Tensor
    """[B, 256] 1 where there is a byte, else 0."""


class HunyuanVideo15Model(PipelineModel):
    """The video transformer, Qwen2.5-VL, ByT5 and the causal VAE."""

    parts: ClassVar = PipelineParts(
        family="hunyuan_video15",
        pipelines={"HunyuanVideo15Pipeline": HunyuanVideo15Pipeline},
        networks={"transformer": HunyuanVideo15Transformer3DModel},
        modules={
            "vae": AutoencoderKLHunyuanVideo15,
            "text_encoder": Qwen2_5_VLTextModel,
            "text_encoder_2": T5EncoderModel,
        },
        processors={
            "tokenizer": Qwen2Tokenizer,
            "tokenizer_2": ByT5Tokenizer,
            "guider": ClassifierFreeGuidance,
        },
        blank={"guider": ClassifierFreeGuidance},
        schedulers={"FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler},
    )

    def __init__(
        self,
        folder: DiffusersFolder,
        networks: Mapping[str, Any],
        frozen: Mapping[str, Any] | None,
        settings: LoadSettings,
    ) -> None:
        """Raises ModelError for a network or guidance of another kind."""
        super().__init__(folder, networks, frozen, settings)
        if networks["transformer"].config["use_meanflow"]:
            raise ModelError(
                f"model.path={folder.path}: its network is distilled to few steps (use_meanflow), "
                "which unirl does not run. Set model.path to another HunyuanVideo 1.5."
            )
        if frozen is None:
            return
        self.pipeline.tokenizer_max_length = settings.max_sequence_length
        self.pipeline.tokenizer_2_max_length = GLYPH_TOKENS
        guider = frozen["guider"]
        if guider is not None and not PLAIN_GUIDANCE.items() <= dict(guider.config).items():
            raise ModelError(
                f"model.path={folder.path}: its guider is {dict(guider.config)}, but only plain "
                "classifier-free guidance is known here. Set guider/guider_config.json to it."
            )

    def write_adapter(self, folder: Path) -> Path:
        """For `pipeline.transformer.load_lora_adapter`: the pipeline itself has no format."""
        return write_lora(HunyuanVideoLoraLoaderMixin, self.trained_components, folder)

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[PromptRecord], sampling: SamplingParams
    ) -> HunyuanVideo15Conditioning:
        """By the pipeline's own method, with its template that asks for a video's description."""
        return HunyuanVideo15Conditioning(
            *self.pipeline.encode_prompt(
                prompt=[prompt.text for prompt in prompts],
                batch_size=len(prompts),
                device=self.pipeline.text_encoder.device,
            )
        )

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, HunyuanVideo15Conditioning)
        batch, channels, *size = latents.shape
        no_frames_given = latents.new_zeros(batch, channels + 1, *size)
        width = self.folder.config("transformer")["image_embed_dim"]
        no_image = latents.new_zeros(batch, IMAGE_TOKENS, width)
        # A layer norm is the first that these two meet: its weights must not be narrower.
        dtype = self.settings.network_dtype
        with self.arithmetic(latents):
            (velocity,) = self.network(
                hidden_states=torch.cat([latents, no_frames_given], dim=1),
                timestep=sigma * self.scheduler.config["num_train_timesteps"],
                # The embeddings may be bf16 beside a float32 network; widening them is exact.
                encoder_hidden_states=conditioning.prompt_embeds.float(),
                encoder_attention_mask=conditioning.mask.float(),
                encoder_hidden_states_2=conditioning.glyph_embeds.to(dtype),
                encoder_attention_mask_2=conditioning.glyph_mask.float(),
                image_embeds=no_image.to(dtype),
                return_dict=False,
            )
        return velocity.float()

    def guided_velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        sampling: SamplingParams,
    ) -> Tensor:
        """[B, *latent] classifier-free guidance by two calls."""
        scale = sampling.guidance_scale
        return classifier_free_apart(self.velocity, latents, sigma, conditioning, negative, scale)

    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        return video_pixels(
            self._frames, latents, sampling.decoded_frames, first_frame_stands_alone=True
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
        parts = video.to(vae.dtype).split(1)
        mode = torch.cat([vae.encode(part).latent_dist.mode() for part in parts])
        return (mode * vae.config["scaling_factor"]).float()

    def latent_shape(self, sampling: SamplingParams) -> tuple[int, ...]:
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
    ) -> HunyuanVideo15Conditioning:
        config, length = self.folder.config("transformer"), self.settings.max_sequence_length
        glyphs = (batch, GLYPH_TOKENS, config["text_embed_2_dim"])
        conditioning = HunyuanVideo15Conditioning(
            torch.randn(batch, length, config["text_embed_dim"], generator=generator),
            torch.ones(batch, length),
            torch.randn(glyphs, generator=generator),
            torch.ones(batch, GLYPH_TOKENS),
        )
        return conditioning.to(next(self.network.parameters()).device)

    def _frames(self, latents: Tensor) -> Tensor:
        """[B, F, 3, H, W] in [0, 1]."""
        vae = self.pipeline.vae
        scaled = latents.to(vae.dtype) / vae.config["scaling_factor"]
        # One by one: diffusers' attention mask in this VAE does not fit to a batch.
        decoded = torch.cat([vae.decode(one, return_dict=False)[0] for one in scaled.split(1)])
        return self.pipeline.video_processor.postprocess_video(decoded, output_type="pt").float()
