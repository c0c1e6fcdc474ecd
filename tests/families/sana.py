"""Sana, with the scheduler it is published with and with the flow-matching one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from builders import prompts, sampling_params
from diffusers import (
    AutoencoderDC,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
)
from torch import Tensor
from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

from families.case import FamilyCase, uint8_of
from families.sd3 import ALPHABET
from unirl.core.types import PromptRecord, SamplingParams

WIDTH = 32
"""Of the text encoder, and of the transformer's text input."""
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "\n", "▁")
VOCABULARY = {piece: i for i, piece in enumerate([*SPECIAL, *ALPHABET])}
"""Every printable ASCII character is a token; `▁` is a space."""


def build_tiny_sana(folder: Path, *, with_dpm_solver: bool, seed: int = 0) -> Path:
    """`folder`, filled with weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = SanaPipeline(
            transformer=_transformer(),
            scheduler=_scheduler(with_dpm_solver),  # type: ignore[arg-type]
            vae=_autoencoder(),
            text_encoder=_gemma(),
            tokenizer=GemmaTokenizer(VOCABULARY, []),
        )
    pipeline.save_pretrained(folder)
    return folder


def _transformer() -> SanaTransformer2DModel:
    return SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=WIDTH,
        sample_size=32,
    )


def _scheduler(with_dpm_solver: bool) -> Any:
    if not with_dpm_solver:
        return FlowMatchEulerDiscreteScheduler(shift=3.0)
    return DPMSolverMultistepScheduler(
        flow_shift=3.0, use_flow_sigmas=True, prediction_type="flow_prediction"
    )


def _autoencoder() -> AutoencoderDC:
    """Shrinks by 8 only: one less halving costs nothing to prove."""
    return AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock"),  # type: ignore[arg-type]
        decoder_block_types=("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock"),  # type: ignore[arg-type]
        encoder_block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        encoder_qkv_multiscales=((), (), (), (5,)),
        decoder_qkv_multiscales=((), (), (), (5,)),
        encoder_layers_per_block=(1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        downsample_block_type="Conv",
        upsample_block_type="interpolate",
        scaling_factor=0.41407,
    )


def _gemma() -> Gemma2Model:
    return Gemma2Model(
        Gemma2Config(
            vocab_size=len(VOCABULARY),
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            query_pre_attn_scalar=16,
            max_position_embeddings=4096,
            pad_token_id=VOCABULARY["<pad>"],
            eos_token_id=VOCABULARY["<eos>"],
            bos_token_id=VOCABULARY["<bos>"],
        )
    )


def _call(
    pipeline: Any,
    prompts: Sequence[PromptRecord],
    sampling: SamplingParams,
    noise: Tensor,
    output_type: str,
) -> Any:
    output = pipeline(
        prompt=[prompt.text for prompt in prompts],
        height=sampling.height,
        width=sampling.width,
        num_inference_steps=sampling.num_inference_steps,
        guidance_scale=sampling.guidance_scale,
        latents=noise,
        max_sequence_length=24,
        use_resolution_binning=False,
        output_type=output_type,
    ).images
    return output if output_type == "latent" else uint8_of(output)


def _case(name: str, with_dpm_solver: bool) -> FamilyCase:
    return FamilyCase(
        name=name,
        family="sana",
        build=partial(build_tiny_sana, with_dpm_solver=with_dpm_solver),
        call=_call,
        sampling=replace(
            sampling_params(num_steps=5, height=32, width=64, eta=0.0),
            solver="dpmpp_2m" if with_dpm_solver else "euler",
        ),
        prompts=prompts("a sign that says 374", "THE number 9, in red"),
        guidance_scales=(1.0, 4.5),
    )


CASES = [_case("sana", True), _case("sana-euler", False)]
