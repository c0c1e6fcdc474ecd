"""MiniMax-H3, whose pipeline is a modular one that makes one video a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from builders import prompts, sampling_params
from diffusers import (
    AutoencoderKLMiniMaxH3,
    MiniMaxH3Blocks,
    MiniMaxH3ModularPipeline,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents
from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from families.case import FamilyCase, uint8_of_videos
from families.sd3 import ALPHABET
from unirl.core.types import PromptRecord, SamplingParams

TEXT_WIDTH, CHANNELS, AUDIO_CHANNELS = 16, 4, 32
NOISE_RATIO = 3.0 / 12.0
"""Of sound and video: the shifts of their schedulers."""


def build_tiny_h3(folder: Path, seed: int = 0) -> Path:
    """`folder`, filled with weights that depend on `seed` alone.

    Without the audio VAE, whose smallest would take most of the tests' time, and without the
    processor of images.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        components = {
            "transformer": _transformer(),
            "vae": _video_vae(),
            "text_encoder": _qwen3_vl(),
            "tokenizer": Qwen2Tokenizer({p: i for i, p in enumerate([*ALPHABET, "Ġ"])}, []),
            "scheduler": MiniMaxH3Scheduler(12.0),
            "audio_scheduler": MiniMaxH3Scheduler(3.0),
        }
    pipeline: Any = MiniMaxH3ModularPipeline(blocks=_blocks())
    pipeline.update_components(**components)
    pipeline.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


def _blocks() -> Any:
    """Text to video and sound, all but the decoding of sound."""
    blocks: Any = MiniMaxH3Blocks().get_workflow("t2va")
    blocks.sub_blocks.pop("decode.audio")
    return blocks


def _transformer() -> MiniMaxH3Transformer3DModel:
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        hidden_size=16,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=24,
        in_channels=CHANNELS,
        audio_in_channels=AUDIO_CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=16,
        time_embed_hidden_dim=16,
        time_embed_dim=16,
        rope_freq_dim=2,
    )


def _video_vae() -> AutoencoderKLMiniMaxH3:
    return AutoencoderKLMiniMaxH3(
        latent_channels=CHANNELS,
        block_out_channels=(8,) * 6,
        layers_per_block=1,
        norm_num_groups=4,
        decoder_num_layers=1,
        decoder_num_attention_heads=1,
        decoder_attention_head_dim=16,
        latents_mean=(0.1, -0.2, 0.3, 0.0),
        latents_std=(1.2, 0.9, 1.0, 1.1),
    )


def _qwen3_vl() -> Qwen3VLForConditionalGeneration:
    text = {
        "vocab_size": 100,
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 51,  # the network is told what the 50th says
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_heads": 1,
        "out_hidden_size": TEXT_WIDTH,
        "patch_size": 4,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision)  # type: ignore[arg-type]
    return Qwen3VLForConditionalGeneration(config)


class _TextProcessor:
    """What the text block asks Qwen3-VL's processor, which needs torchvision, about texts."""

    def create_mm_token_type_ids(self, token_ids: list[list[int]]) -> list[list[int]]:
        return [[0] * len(ids) for ids in token_ids]


def _open(folder: Path) -> Any:
    pipeline: Any = MiniMaxH3ModularPipeline(
        blocks=_blocks(), pretrained_model_name_or_path=str(folder)
    )
    pipeline.load_components(
        names=["transformer", "vae", "text_encoder", "tokenizer", "scheduler", "audio_scheduler"]
    )
    pipeline.update_components(processor=_TextProcessor())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _call(
    pipeline: Any,
    prompts: Sequence[PromptRecord],
    sampling: SamplingParams,
    noise: Tensor,
    output_type: str,
) -> Any:
    made = [
        _made(pipeline, prompt.text, sampling, one, output_type)
        for prompt, one in zip(prompts, noise, strict=True)
    ]
    return torch.cat(made)


def _made(
    pipeline: Any, prompt: str, sampling: SamplingParams, noise: Tensor, output_type: str
) -> Tensor:
    num_audio = round(sampling.num_frames / 24 * 40)
    grid = (37, sampling.height // 32, sampling.width // 32)
    audio_values = 2 * num_audio * AUDIO_CHANNELS
    video, audio = noise.split([noise.numel() - audio_values, audio_values])
    rows = video.view(1, *grid, CHANNELS, 2, 2).permute(0, 4, 1, 2, 5, 3, 6)
    state = pipeline(
        prompt=prompt,
        height=sampling.height,
        width=sampling.width,
        num_frames=sampling.num_frames,
        # The pipeline counts levels.
        num_inference_steps=sampling.num_inference_steps + 1,
        latents=rows.flatten(5, 6).flatten(3, 4),
        audio_latents=audio.view(2, num_audio, AUDIO_CHANNELS).transpose(1, 2),
        output_type="np",
    )
    if output_type != "latent":
        return uint8_of_videos(state.get("videos"))
    sound = state.get("audio_latents").transpose(1, 2).flatten() / NOISE_RATIO
    return torch.cat([patchify_video_latents(state.get("latents"), (1, 2, 2)).flatten(), sound])[
        None
    ]


CASES = [
    FamilyCase(
        name="minimax-h3",
        family="minimax_h3",
        build=build_tiny_h3,
        call=_call,
        open_pipeline=_open,
        sampling=replace(
            sampling_params(num_steps=4, height=32, width=64, eta=0.0), num_frames=124
        ),
        prompts=prompts("a cat runs", "THE number 9, in red, turns around"),
        guidance_scales=(1.0,),
        # The released frames are blended of tiles.
        tiled=("vae",),
        max_sequence_length=48,  # the pipeline reads whole prompts
    )
]
