"""Wan 2.1 and 2.2, image to video."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from builders import prompts, sampling_params
from diffusers import WanImageToVideoPipeline
from diffusers.pipelines.wan.pipeline_wan import basic_clean
from PIL import Image
from torch import Tensor
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from families.case import FamilyCase, load_lora_weights, picture_file, uint8_of_videos
from families.wan import (
    load_both_adapters,
    umt5_encoder,
    umt5_tokenizer,
    wan_scheduler,
    wan_transformer,
    wan_vae,
)
from unirl.core.types import PromptRecord, SamplingParams
from unirl.models.wan_i2v import TEXT_TOKENS

CLIP_WIDTH = 16
BOUNDARY = 0.9
"""Of the published Wan 2.2 I2V."""


def build_tiny_wan_i2v(folder: Path, *, with_experts: bool, seed: int = 0) -> Path:
    """`folder`, filled with weights that depend on `seed` alone: Wan 2.2 with experts and no CLIP,
    else Wan 2.1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        dims = {} if with_experts else {"image_dim": CLIP_WIDTH, "added_kv_proj_dim": 24}
        pipeline = WanImageToVideoPipeline(
            transformer=wan_transformer(in_channels=36, **dims),
            scheduler=wan_scheduler("unipc"),
            vae=wan_vae(),
            text_encoder=umt5_encoder(),
            tokenizer=umt5_tokenizer(),  # type: ignore[arg-type]
            image_encoder=None if with_experts else clip_vision(),  # type: ignore[arg-type]
            image_processor=None if with_experts else clip_processor(),
            transformer_2=wan_transformer(in_channels=36) if with_experts else None,  # type: ignore[arg-type]
            boundary_ratio=BOUNDARY if with_experts else None,
        )
    pipeline.save_pretrained(folder)
    return folder


def clip_vision() -> CLIPVisionModel:
    return CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=CLIP_WIDTH,
            intermediate_size=32,
            projection_dim=CLIP_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=32,
            patch_size=2,
        )
    )


def clip_processor() -> Any:
    return CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, do_center_crop=True
    )


def _call(
    pipeline: Any,
    prompts: Sequence[PromptRecord],
    sampling: SamplingParams,
    noise: Tensor,
    output_type: str,
) -> Any:
    """One by one: the pipeline takes one image."""
    outputs = [
        pipeline(
            image=Image.open(prompt.images[0]),
            prompt=prompt.text,
            height=sampling.height,
            width=sampling.width,
            num_frames=sampling.num_frames,
            num_inference_steps=sampling.num_inference_steps,
            guidance_scale=sampling.guidance_scale,
            guidance_scale_2=sampling.low_noise_guidance_scale,
            latents=noise[number : number + 1],
            max_sequence_length=TEXT_TOKENS,
            output_type=output_type,
        ).frames
        for number, prompt in enumerate(prompts)
    ]
    if output_type == "latent":
        return torch.cat(outputs)
    return torch.cat([uint8_of_videos(output) for output in outputs])


def _case(
    name: str, *, with_experts: bool, load_adapter: Callable[[Any, Path], None], **sampling: Any
) -> FamilyCase:
    texts = prompts("it turns around", "THE number 9, in red, is painted over")
    pictures = [picture_file("wide", 96, 64), picture_file("square", 40, 40)]
    return FamilyCase(
        name=name,
        family="wan_i2v",
        build=partial(build_tiny_wan_i2v, with_experts=with_experts),
        call=_call,
        sampling=replace(
            sampling_params(num_steps=5, height=32, width=48, eta=0.0),
            num_frames=5,
            solver="unipc",
            **sampling,
        ),
        prompts=[
            replace(prompt, images=(file,)) for prompt, file in zip(texts, pictures, strict=True)
        ],
        guidance_scales=(1.0, 4.5),
        max_sequence_length=TEXT_TOKENS,
        load_adapter=load_adapter,
        # Its own needs the package ftfy; that of the pipeline from text does without.
        patched={"diffusers.pipelines.wan.pipeline_wan_i2v.basic_clean": basic_clean},
    )


CASES = [
    _case("wan2.1-i2v", with_experts=False, load_adapter=load_lora_weights),
    _case(
        "wan2.2-i2v",
        with_experts=True,
        load_adapter=load_both_adapters,
        low_noise_guidance_scale=3.0,
    ),
]
