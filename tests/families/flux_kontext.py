"""FLUX.1 Kontext."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from builders import sampling_params
from diffusers import FluxKontextPipeline
from torch import Tensor

from families.case import FamilyCase, picture_file, uint8_of
from families.flux import flux_components
from unirl.core.types import PromptRecord, SamplingParams
from unirl.models.condition_images import open_images
from unirl.models.flux import packed, unpacked

SIZES = "diffusers.pipelines.flux.pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS"
"""The published ones have a megapixel each."""


def build_tiny_flux_kontext(folder: Path, *, seed: int = 0) -> Path:
    """`folder`, filled with weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = FluxKontextPipeline(**flux_components(guided=True))
    pipeline.save_pretrained(folder)
    return folder


def _call(
    pipeline: Any,
    prompts: Sequence[PromptRecord],
    sampling: SamplingParams,
    noise: Tensor,
    output_type: str,
) -> Any:
    output = pipeline(
        image=[image for prompt in prompts for image in open_images(prompt)],
        prompt=[prompt.text for prompt in prompts],
        height=sampling.height,
        width=sampling.width,
        max_area=sampling.height * sampling.width,  # else it makes about a megapixel
        num_inference_steps=sampling.num_inference_steps,
        guidance_scale=sampling.guidance_scale,
        latents=packed(noise),
        max_sequence_length=24,
        output_type=output_type,
    ).images
    return unpacked(output, *noise.shape[2:]) if output_type == "latent" else uint8_of(output)


CASES = [
    FamilyCase(
        name="flux-kontext",
        family="flux_kontext",
        build=build_tiny_flux_kontext,
        call=_call,
        sampling=sampling_params(num_steps=5, height=32, width=64, eta=0.0),
        prompts=(
            PromptRecord("0", "make it red", images=(picture_file("kontext-wide", 70, 50),)),
            PromptRecord("1", "THE number 9", images=(picture_file("kontext-large", 151, 108),)),
        ),
        guidance_scales=(1.0, 2.5),
        patched={SIZES: [(32, 64), (48, 32), (32, 32)]},
    )
]
