"""MiniMax-H3, text to video with a stereo soundtrack, read from a local diffusers folder.

Video and sound are sampled together: a sample's latents are the rows of the video and, behind them,
those of the sound, one after the other as one vector. Rewards see the video; the sound's rows are
trained with it, but the audio VAE is not loaded. Guidance is in the weights, so there is none.

Sound has less noise than video at every step: its shift is 3, the video's 12. As a shift multiplies
the ratio of noise to signal, sound at level s' with s' / (1 - s') = k s / (1 - s), k = 3 / 12, is
x' = (1 - s') x0 + s' e = (k / c) ((1 - s) x0 / k + s e) with c = 1 - s + k s: a flow at the video's
level s of clean latents x0 / k. The loop works on that one, so every solver and kernel holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, ClassVar

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from diffusers.loaders import MiniMaxH3LoraLoaderMixin
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (
    MINIMAX_H3_AUDIO_CHANNELS,
    MINIMAX_H3_AUDIO_TAG,
    MINIMAX_H3_FPS,
    MINIMAX_H3_TEXT_TAG,
    MINIMAX_H3_VIDEO_TAG,
    audio_latent_num_frames,
    video_latent_num_frames,
)
from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen3VLForConditionalGeneration

from unirl.core.errors import DataError, ModelError
from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.diffusers_folder import PipelineParts
from unirl.models.flow_match import scheduler_sigmas
from unirl.models.pipeline_model import PipelineModel
from unirl.models.video_frames import decoded_one_by_one, video_pixels

TEXT_LAYER = 50
"""The hidden state of Qwen3-VL that the network was trained on."""
SECONDS = (5, 15)
"""Shortest and longest video."""
PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, in which the VAE gives its frames."""


@dataclass(frozen=True)
class MiniMaxH3Conditioning(Conditioning):
    """What the network is told about B samples."""

    prompt_embeds: Tensor
    """[B, L, D] tokens of the longest of these prompts, zeros after a prompt's end."""
    text_mask: Tensor
    """[B, L] bool, True for a prompt's tokens."""
    video_places: Tensor
    """[B, f h w, 3] float64 time, row and column of each row of the video, from time 0 on."""
    audio_places: Tensor
    """[B, 2 a, 3] float64 of the sound, one channel after the other."""


class MiniMaxH3Components(MiniMaxH3LoraLoaderMixin):
    """The components by their names, and the pipeline's LoRA format.

    The modular pipeline itself makes one video a call and is not needed.
    """

    def __init__(self, **components: Any) -> None:
        for name, component in components.items():
            setattr(self, name, component)


class MiniMaxH3Model(PipelineModel):
    """The transformer over one sequence of text, sound and video; Qwen3-VL, and the video's VAE."""

    parts: ClassVar = PipelineParts(
        family="minimax_h3",
        pipelines={"MiniMaxH3ModularPipeline": MiniMaxH3Components},
        networks={"transformer": MiniMaxH3Transformer3DModel},
        modules={
            "vae": AutoencoderKLMiniMaxH3,
            "text_encoder": Qwen3VLForConditionalGeneration,
        },
        processors={"tokenizer": Qwen2Tokenizer},
        schedulers={"MiniMaxH3Scheduler": MiniMaxH3Scheduler},
    )

    def check_prompts(self, prompts: Sequence[PromptRecord], key: str) -> None:
        """Raise DataError for a prompt without words: there is no token that begins one."""
        for prompt in prompts:
            if not prompt.text:
                raise DataError(
                    f"{key}: prompt {prompt.prompt_id} is empty, and model.family=minimax_h3 has "
                    "nothing to read then. Give it a text."
                )

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[PromptRecord], sampling: SamplingParams
    ) -> MiniMaxH3Conditioning:
        """Each prompt by itself, cut to max_sequence_length, as it stands: without a template."""
        texts = [self._encoded(prompt.text) for prompt in prompts]
        lengths = [len(text) for text in texts]
        mask = torch.stack([torch.arange(max(lengths)) < length for length in lengths])
        device = texts[0].device
        video, audio = self._places(sampling)
        return MiniMaxH3Conditioning(
            torch.nn.utils.rnn.pad_sequence(texts, batch_first=True),
            mask.to(device),
            video.expand(len(prompts), -1, -1).to(device),
            audio.expand(len(prompts), -1, -1).to(device),
        )

    def encode_negative(self, prompts: Sequence[PromptRecord], sampling: SamplingParams) -> None:
        """None: guidance is in the weights."""
        return

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """One sample after the other: their sequences differ in length."""
        assert isinstance(conditioning, MiniMaxH3Conditioning)
        samples = zip(
            latents,
            sigma,
            conditioning.prompt_embeds,
            conditioning.text_mask,
            conditioning.video_places,
            conditioning.audio_places,
            strict=True,
        )
        return torch.stack([self._velocity_of_one(*sample) for sample in samples])

    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        frames, height, width = self._grid(sampling)
        _, patch_height, patch_width = self._config["patch_size"]
        rows = latents[:, : self._num_video_values(sampling)].unflatten(
            1, (frames, height, width, -1, patch_height, patch_width)
        )
        video = rows.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)
        return video_pixels(
            self._frames, video, sampling.decoded_frames, first_frame_stands_alone=False
        )

    @torch.no_grad()
    def decode(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        return decoded_one_by_one(self.pixels, latents, sampling)

    def latent_shape(self, sampling: SamplingParams) -> tuple[int, ...]:
        """Raises ModelError for sizes and lengths that it does not make, and for guidance."""
        self.require_no_guidance(sampling)
        audio_values = self._num_audio_rows(sampling) * self._config["audio_in_channels"]
        return (self._num_video_values(sampling) + audio_values,)

    def sigmas(self, sampling: SamplingParams) -> tuple[float, ...]:
        """The video's. num_inference_steps are forwards here; the pipeline counts one more."""
        sigmas = scheduler_sigmas(self.scheduler, sampling.num_inference_steps + 1)
        if len(sigmas) != sampling.num_inference_steps + 1:
            raise ModelError(
                f"sampling.num_inference_steps={sampling.num_inference_steps}: some of so many "
                "noise levels are equal in float32. Lower it."
            )
        return sigmas

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> MiniMaxH3Conditioning:
        length = self.settings.max_sequence_length
        video, audio = self._places(sampling)
        conditioning = MiniMaxH3Conditioning(
            torch.randn(batch, length, self._config["text_dim"], generator=generator),
            torch.ones(batch, length, dtype=torch.bool),
            video.expand(batch, -1, -1),
            audio.expand(batch, -1, -1),
        )
        return conditioning.to(next(self.network.parameters()).device)

    def _encoded(self, text: str) -> Tensor:
        """[L, D]."""
        encoder = self.pipeline.text_encoder
        tokens = self.pipeline.tokenizer(
            [text],
            add_special_tokens=False,
            padding=False,
            truncation=True,
            max_length=self.settings.max_sequence_length,
        )
        ids = torch.as_tensor(tokens["input_ids"], dtype=torch.long).to(encoder.device)
        output = encoder.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=torch.zeros_like(ids),  # no image among them
            use_cache=False,
            output_hidden_states=True,
        )
        return output.hidden_states[TEXT_LAYER][0]

    def _velocity_of_one(
        self,
        latents: Tensor,
        sigma: Tensor,
        embeds: Tensor,
        mask: Tensor,
        video_places: Tensor,
        audio_places: Tensor,
    ) -> Tensor:
        """[D] for latents [D] at level sigma [], and the conditioning of one sample."""
        texts, num_audio, num_video = embeds[mask], len(audio_places), len(video_places)
        audio_values = num_audio * self._config["audio_in_channels"]
        video, sound = latents.split([len(latents) - audio_values, audio_values])
        ratio = self._noise_ratio
        scale = ratio / (1 - sigma + ratio * sigma)
        audio_sigma, audio = scale * sigma, scale * sound
        with self.arithmetic(latents):
            # The network predicts clean - noise, and counts time from noise to clean.
            video_answer, audio_answer = self.network(
                hidden_states=video.view(1, num_video, -1),
                audio_hidden_states=audio.view(1, num_audio, -1),
                encoder_hidden_states=texts[None].float(),
                timestep=torch.stack([1 - sigma, 1 - audio_sigma]),
                return_dict=False,
                **packed_sequence(len(texts), video_places, audio_places),
            )
        audio_velocity = -audio_answer.float().flatten()
        clean = audio - audio_sigma * audio_velocity
        noise = audio + (1 - audio_sigma) * audio_velocity
        return torch.cat([-video_answer.float().flatten(), noise - clean / ratio])

    def _frames(self, video: Tensor) -> Tensor:
        """[B, F, 3, H, W] in [0, 1] of latents [B, C, f, h, w]."""
        vae = self.pipeline.vae

        def per_channel(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, device=video.device).view(1, -1, 1, 1, 1)

        scaled = video * per_channel(vae.config["latents_std"])
        scaled = scaled + per_channel(vae.config["latents_mean"])
        decoded = vae.decode(scaled.to(vae.dtype), return_dict=False)[0].float()
        frames = decoded * per_channel(PIXEL_STD) + per_channel(PIXEL_MEAN)
        return frames.clamp(0, 1).transpose(1, 2)

    def _places(self, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        """[f h w, 3] of the video and [2 a, 3] of the sound, by the pipeline's own count."""
        frames, height, width = self._grid(sampling)
        patch = self._config["patch_size"]
        positions, *_ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            torch.empty(0),  # no texts: time begins with the video
            frames,
            height * patch[1],
            width * patch[2],
            self._num_audio_rows(sampling) // MINIMAX_H3_AUDIO_CHANNELS,
            patch,
            MINIMAX_H3_AUDIO_CHANNELS,
            MINIMAX_H3_AUDIO_TAG,
            MINIMAX_H3_VIDEO_TAG,
        )
        audio, video = positions.split([self._num_audio_rows(sampling), frames * height * width])
        return video, audio

    def _grid(self, sampling: SamplingParams) -> tuple[int, int, int]:
        """Frames, rows and columns of the video's rows of the sequence."""
        vae, patch = self.folder.config("vae"), self._config["patch_size"]
        if patch[0] != 1 or patch[1] != patch[2]:
            raise ModelError(f"model.path={self.folder.path}: patch_size={patch} is not (1, p, p).")
        factor = prod(vae["spatial_downsample_factors"])
        self.require_multiple(
            sampling, factor * patch[1], f"VAE factor {factor} x patch {patch[1]}"
        )
        clip = vae["clip_length"]
        chunk = ceil(clip / prod(vae["temporal_downsample_factors"]))
        shortest, longest = (seconds * MINIMAX_H3_FPS for seconds in SECONDS)
        num_frames = sampling.num_frames
        if num_frames % clip != chunk or not shortest <= num_frames <= longest:
            raise ModelError(
                f"sampling.num_frames={num_frames}: this model takes {chunk} more than a multiple "
                f"of {clip}, from {shortest} to {longest} ({MINIMAX_H3_FPS} a second). Change "
                "sampling.num_frames."
            )
        multiple = factor * patch[1]
        frames = video_latent_num_frames(num_frames, clip, chunk)
        return frames, sampling.height // multiple, sampling.width // multiple

    def _num_video_values(self, sampling: SamplingParams) -> int:
        return (
            prod(self._grid(sampling))
            * self._config["in_channels"]
            * prod(self._config["patch_size"])
        )

    def _num_audio_rows(self, sampling: SamplingParams) -> int:
        return MINIMAX_H3_AUDIO_CHANNELS * audio_latent_num_frames(sampling.num_frames)

    @property
    def _noise_ratio(self) -> float:
        """k: noise to signal of the sound over that of the video."""
        sound = self.folder.config("audio_scheduler", "scheduler_config.json")
        return sound["shift"] / self.scheduler.config["shift"]

    @property
    def _config(self) -> Mapping[str, Any]:
        """The transformer's."""
        network: Any = self.network
        return network.config


def packed_sequence(num_text: int, video_places: Tensor, audio_places: Tensor) -> dict[str, Tensor]:
    """The network's description of one sequence: texts, then sound, then video.

    Texts are at times 0, 1, ..., and the others' times go on from there. Timestep 0 is the video's
    and the texts', timestep 1 the sound's.
    """
    device = video_places.device
    counts = [num_text, len(audio_places), len(video_places)]
    text_places = video_places.new_zeros(num_text, 3)
    text_places[:, 0] = torch.arange(num_text, device=device)
    start = video_places.new_tensor([num_text, 0, 0])
    text, audio, video = torch.arange(sum(counts), device=device).split(counts)
    tags = [MINIMAX_H3_TEXT_TAG, MINIMAX_H3_AUDIO_TAG, MINIMAX_H3_VIDEO_TAG]

    def for_each(values: Sequence[int]) -> Tensor:
        """[sum(counts)] int64."""
        pairs = zip(values, counts, strict=True)
        return torch.cat([torch.full((n,), value, device=device) for value, n in pairs])

    return {
        "position_ids": torch.cat([text_places, audio_places + start, video_places + start]),
        "token_tags": for_each(tags),
        "timestep_indices": for_each([0, 1, 0]),
        "text_indices": text,
        "audio_indices": audio,
        "video_indices": video,
    }
