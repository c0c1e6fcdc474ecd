"""LTX-2, video with sound, in the layouts of 2.0 and 2.3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from builders import prompts, sampling_params
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, GemmaTokenizer

from families.case import FamilyCase, uint8_of_videos
from families.sd3 import ALPHABET
from unirl.core.types import PromptRecord, SamplingParams

TEXT_WIDTH, NUM_TEXT_LAYERS = 16, 2
CHANNELS = 8
WORDS = {piece: i for i, piece in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "▁", *ALPHABET])}


def build_tiny_ltx2(folder: Path, *, newer: bool, seed: int = 0) -> Path:
    """`folder`, filled with weights that depend on `seed` alone; newer: laid out as LTX-2.3."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = LTX2Pipeline(
            transformer=_transformer(newer),
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True,
                base_image_seq_len=1024,
                max_image_seq_len=4096,
                base_shift=0.95,
                max_shift=2.05,
                shift_terminal=0.1,
            ),
            vae=_video_vae(),
            audio_vae=AutoencoderKLLTX2Audio(
                base_channels=CHANNELS,
                ch_mult=(1, 2, 2),
                num_res_blocks=1,
                latent_channels=2,
                mel_bins=16,
            ),
            vocoder=LTX2Vocoder(
                in_channels=32, hidden_channels=8, upsample_kernel_sizes=[4], upsample_factors=[2]
            ),
            text_encoder=_gemma(),
            tokenizer=GemmaTokenizer(WORDS, [], add_bos_token=True),  # type: ignore[arg-type]
            connectors=_connectors(newer),
        )
    pipeline.save_pretrained(folder)
    return folder


def _transformer(newer: bool) -> LTX2VideoTransformer3DModel:
    return LTX2VideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=CHANNELS,
        audio_out_channels=CHANNELS,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        caption_channels=TEXT_WIDTH,
        rope_type="split",
        gated_attn=newer,
        audio_gated_attn=newer,
        cross_attn_mod=newer,
        audio_cross_attn_mod=newer,
        use_prompt_embeddings=not newer,
        perturbed_attn=newer,
    )


def _video_vae() -> AutoencoderKLLTX2Video:
    vae = AutoencoderKLLTX2Video(
        latent_channels=CHANNELS,
        block_out_channels=(8, 16, 32, 64),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    vae.latents_mean.copy_(torch.randn(CHANNELS))
    vae.latents_std.copy_(torch.rand(CHANNELS) + 0.5)
    return vae


def _gemma() -> Gemma3ForConditionalGeneration:
    text = {
        "vocab_size": len(WORDS),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": NUM_TEXT_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 16,
        "patch_size": 8,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)  # type: ignore[arg-type]
    return Gemma3ForConditionalGeneration(config)


def _connectors(newer: bool) -> LTX2TextConnectors:
    width = 16 if newer else TEXT_WIDTH
    audio_width = 8 if newer else TEXT_WIDTH
    return LTX2TextConnectors(
        caption_channels=TEXT_WIDTH,
        text_proj_in_factor=NUM_TEXT_LAYERS + 1,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=width // 2,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=8,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=audio_width // 2,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=8,
        rope_type="split",
        per_modality_projections=newer,
        video_hidden_dim=width,
        audio_hidden_dim=audio_width,
    )


def _call(
    pipeline: Any,
    prompts: Sequence[PromptRecord],
    sampling: SamplingParams,
    noise: Tensor,
    output_type: str,
) -> Any:
    num_audio = round(sampling.num_frames / 24 * 25)
    grid = ((sampling.num_frames - 1) // 8 + 1, sampling.height // 32, sampling.width // 32)
    video, audio = noise.split([noise.shape[1] - num_audio, num_audio], dim=1)
    vae, audio_vae = pipeline.vae, pipeline.audio_vae
    output = pipeline(
        prompt=[prompt.text for prompt in prompts],
        height=sampling.height,
        width=sampling.width,
        num_frames=sampling.num_frames,
        num_inference_steps=sampling.num_inference_steps,
        guidance_scale=sampling.guidance_scale,
        audio_guidance_scale=None,
        stg_scale=0.0,
        audio_stg_scale=None,
        modality_scale=1.0,
        audio_modality_scale=None,
        guidance_rescale=0.0,
        audio_guidance_rescale=None,
        latents=video,
        # The pipeline normalises what it is given, tokens too.
        audio_latents=audio * audio_vae.latents_std + audio_vae.latents_mean,
        max_sequence_length=24,
        output_type=output_type,
    )
    if output_type != "latent":
        return uint8_of_videos(output.frames)
    normalised = pipeline._normalize_latents(
        output.frames, vae.latents_mean, vae.latents_std, vae.config.scaling_factor
    )
    assert normalised.shape[2:] == grid
    sound = (pipeline._pack_audio_latents(output.audio) - audio_vae.latents_mean) / (
        audio_vae.latents_std
    )
    return torch.cat([pipeline._pack_latents(normalised), sound], dim=1)


def _case(name: str, newer: bool) -> FamilyCase:
    return FamilyCase(
        name=name,
        family="ltx2",
        build=partial(build_tiny_ltx2, newer=newer),
        call=_call,
        sampling=replace(sampling_params(num_steps=5, height=64, width=96, eta=0.0), num_frames=17),
        prompts=prompts("a cat runs", "THE number 9, in red, turns around"),
        guidance_scales=(1.0, 3.0),
    )


CASES = [_case("ltx2", False), _case("ltx2.3", True)]
