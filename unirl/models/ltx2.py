"""LTX-2, text to video with a soundtrack, read from a local diffusers folder.

Video and sound are sampled together: a sample's latents are the tokens of the video and, behind
them, those of the sound, [f h w + a, 128]. Rewards see the video; the sound's tokens are trained
with it, but neither the audio VAE nor the vocoder is loaded. Of the pipeline's kinds of guidance
the classifier-free one is there, with one scale for video and sound: what the pipeline does with
stg_scale=0, modality_scale=1, guidance_rescale=0 and the audio_* arguments left at None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from diffusers import (
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from torch import Tensor
from transformers import Gemma3ForConditionalGeneration, GemmaTokenizer

from unirl.core.errors import ModelError
from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.diffusers_folder import PipelineParts
from unirl.models.flow_match import linear_grid, resolution_shift, scheduler_sigmas
from unirl.models.on_meta import BlankTokenizer
from unirl.models.pipeline_model import PipelineModel
from unirl.models.video_frames import decoded_one_by_one, num_latent_frames, video_pixels

FRAMES_PER_SECOND = 24.0
"""Of the videos that are made, as the pipeline has it unless told otherwise."""


@dataclass(frozen=True)
class Ltx2Conditioning(Conditioning):
    """What the network is told about B samples."""

    video_texts: Tensor
    """[B, max_sequence_length, D] the prompt for the video."""
    audio_texts: Tensor
    """[B, max_sequence_length, D'] the prompt for the sound."""
    text_mask: Tensor
    """[B, max_sequence_length] int64, 1 for tokens that are read."""
    video_places: Tensor
    """[B, 3, f h w, 2] float32 where each token begins and ends: seconds, rows, columns."""
    audio_places: Tensor
    """[B, 1, a, 2] float32 seconds."""


class _BlankGemmaTokenizer(BlankTokenizer):
    """With what the pipeline sets in Gemma's."""

    padding_side = "left"
    pad_token = "<pad>"


class Ltx2Model(PipelineModel):
    """The transformer of both streams, Gemma with its connectors, and the video's VAE."""

    parts: ClassVar = PipelineParts(
        family="ltx2",
        pipelines={"LTX2Pipeline": LTX2Pipeline},
        networks={"transformer": LTX2VideoTransformer3DModel},
        modules={
            "vae": AutoencoderKLLTX2Video,
            "text_encoder": Gemma3ForConditionalGeneration,
            "connectors": LTX2TextConnectors,
        },
        processors={"tokenizer": GemmaTokenizer},
        schedulers={"FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler},
        blank={"tokenizer": _BlankGemmaTokenizer},
        fixed={"audio_vae": None, "vocoder": None},
    )

    @torch.no_grad()
    def encode(self, prompts: Sequence[PromptRecord], sampling: SamplingParams) -> Ltx2Conditioning:
        """By the pipeline's own method and connectors, in frozen_dtype.

        Learned tokens take the place of the padding, so max_sequence_length must be a multiple of
        their number (128).
        """
        device = self.pipeline.text_encoder.device
        embeds, mask, _, _ = self.pipeline.encode_prompt(
            [prompt.text for prompt in prompts],
            do_classifier_free_guidance=False,
            max_sequence_length=self.settings.max_sequence_length,
            device=device,
        )
        side = self.pipeline.tokenizer.padding_side
        video, audio, mask = self.pipeline.connectors(embeds, mask, padding_side=side)
        return Ltx2Conditioning(video, audio, mask, *self._places(len(prompts), sampling, device))

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, Ltx2Conditioning)
        video_places, audio_places = conditioning.video_places, conditioning.audio_places
        lengths = [video_places.shape[2], audio_places.shape[2]]
        video, audio = latents.split(lengths, dim=1)
        timestep = sigma * self.scheduler.config["num_train_timesteps"]
        with self.arithmetic(latents):
            both = self.network(
                hidden_states=video,
                audio_hidden_states=audio,
                encoder_hidden_states=conditioning.video_texts.float(),
                audio_encoder_hidden_states=conditioning.audio_texts.float(),
                timestep=timestep,
                sigma=timestep,
                encoder_attention_mask=conditioning.text_mask,
                audio_encoder_attention_mask=conditioning.text_mask,
                video_coords=video_places,
                audio_coords=audio_places,
                use_cross_timestep=True,
                return_dict=False,
            )
        return torch.cat([stream.float() for stream in both], dim=1)

    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        grid = self._grid(sampling)
        video = latents[:, : prod(grid)].transpose(1, 2).unflatten(2, grid)
        return video_pixels(
            self._frames, video, sampling.decoded_frames, first_frame_stands_alone=False
        )

    @torch.no_grad()
    def decode(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        return decoded_one_by_one(self.pixels, latents, sampling)

    def latent_shape(self, sampling: SamplingParams) -> tuple[int, ...]:
        """Raises ModelError for sizes that are no whole number of tokens, and for a network whose
        tokens are not single latents of equal width for video and sound."""
        config = self._config
        patches = [config["patch_size"], config["patch_size_t"]]
        if config["in_channels"] != config["audio_in_channels"] or patches != [1, 1]:
            raise ModelError(
                f"model.path={self.folder.path}: the transformer has tokens of "
                f"{config['in_channels']} (video) and {config['audio_in_channels']} (sound) "
                f"numbers and patches of {patches}; model.family=ltx2 takes equal widths and "
                "patches of 1."
            )
        num_tokens = prod(self._grid(sampling)) + self._num_audio_tokens(sampling)
        return (num_tokens, config["in_channels"])

    def sigmas(self, sampling: SamplingParams) -> tuple[float, ...]:
        """The pipeline's own: T equal levels, shifted by the number of video tokens."""
        return scheduler_sigmas(
            self.scheduler,
            sampling.num_inference_steps,
            mu=resolution_shift(self.scheduler.config, prod(self._grid(sampling))),
            grid=linear_grid(sampling.num_inference_steps),
        )

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> Ltx2Conditioning:
        config, length = self._config, self.settings.max_sequence_length
        widths = [config["cross_attention_dim"], config["audio_cross_attention_dim"]]
        if config["use_prompt_embeddings"]:
            widths = [config["caption_channels"]] * 2
        device = next(self.network.parameters()).device
        video, audio = (torch.randn(batch, length, w, generator=generator) for w in widths)
        mask = torch.ones(batch, length, dtype=torch.int64)
        places = self._places(batch, sampling, torch.device("cpu"))
        return Ltx2Conditioning(video, audio, mask, *places).to(device)

    @property
    def _config(self) -> Mapping[str, Any]:
        """The transformer's, with defaults for what older folders do not say."""
        network: Any = self.network
        return network.config

    def _frames(self, video: Tensor) -> Tensor:
        """[B, F, 3, H, W] in [0, 1] of latents [B, C, f, h, w]."""
        pipeline, vae = self.pipeline, self.pipeline.vae
        scaled = pipeline._denormalize_latents(
            video, vae.latents_mean, vae.latents_std, vae.config["scaling_factor"]
        )
        decoded = vae.decode(scaled.to(vae.dtype), None, return_dict=False)[0]
        return pipeline.video_processor.postprocess_video(decoded, output_type="pt").float()

    def _grid(self, sampling: SamplingParams) -> tuple[int, int, int]:
        """Frames, rows and columns of video tokens."""
        stride, factor, _ = self._config["vae_scale_factors"]
        self.require_multiple(sampling, factor, f"VAE factor {factor}")
        frames = num_latent_frames(sampling, stride)
        return frames, sampling.height // factor, sampling.width // factor

    def _num_audio_tokens(self, sampling: SamplingParams) -> int:
        config = self._config
        per_second = (
            config["audio_sampling_rate"]
            / config["audio_hop_length"]
            / float(config["audio_scale_factor"])
        )
        return round(sampling.num_frames / FRAMES_PER_SECOND * per_second)

    def _places(
        self, batch: int, sampling: SamplingParams, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Where the tokens are, by the network's own count."""
        network: Any = self.network
        video = network.rope.prepare_video_coords(
            batch, *self._grid(sampling), device, fps=FRAMES_PER_SECOND
        )
        num_audio_tokens = self._num_audio_tokens(sampling)
        return video, network.audio_rope.prepare_audio_coords(batch, num_audio_tokens, device)
