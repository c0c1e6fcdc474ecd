"""FLUX.1 dev and schnell."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from builders import prompts, sampling_params
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from torch import Tensor
from transformers import CLIPTextModel

from families.case import FamilyCase, uint8_of
from families.sd3 import (
    CLIP_WIDTH,
    T5_WIDTH,
    clip_config,
    clip_tokenizer,
    kl_vae,
    t5_encoder,
    t5_tokenizer,
)
from unirl.core.types import PromptRecord, SamplingParams
from unirl.models.flux import packed, unpacked


def build_tiny_flux(folder: Path, *, guided: bool, seed: int = 0) -> Path:
    """`folder`, filled with weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = FluxPipeline(**flux_components(guided=guided))
    pipeline.save_pretrained(folder)
    return folder


def flux_components(*, guided: bool) -> dict[str, Any]:
    """Arguments of FluxPipeline and FluxKontextPipeline."""
    return {
        "transformer": FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=T5_WIDTH,
            pooled_projection_dim=CLIP_WIDTH,
            guidance_embeds=guided,
            axes_dims_rope=(4, 4, 8),
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(
            shift=3.0 if guided else 1.0, use_dynamic_shifting=guided
        ),
        "vae": kl_vae(latent_channels=4),
        "text_encoder": CLIPTextModel(clip_config()),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": t5_encoder(),
        "tokenizer_2": t5_tokenizer(),
    }


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
        latents=packed(noise),
        max_sequence_length=24,
        output_type=output_type,
    ).images
    return unpacked(output, *noise.shape[2:]) if output_type == "latent" else uint8_of(output)


def _case(name: str, guided: bool, guidance_scales: tuple[float, ...]) -> FamilyCase:
    return FamilyCase(
        name=name,
        family="flux",
        build=partial(build_tiny_flux, guided=guided),
        call=_call,
        sampling=sampling_params(num_steps=5, height=32, width=64, eta=0.0),
        prompts=prompts("a sign that says 374", "THE number 9, in red"),
        guidance_scales=guidance_scales,
    )


CASES = [_case("flux-dev", True, (1.0, 3.5)), _case("flux-schnell", False, (1.0,))]
