"""Stable Diffusion XL, with either reading of the empty prompt."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from builders import prompts, sampling_params
from diffusers import StableDiffusionXLPipeline
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from families.case import FamilyCase
from families.sd3 import CLIP_WIDTH, clip_config, clip_tokenizer, kl_vae
from families.sd15 import call_unet_pipeline, tiny_scheduler, tiny_unet

TIME_WIDTH = 8
"""Of each size input's embedding."""


def build_tiny_sdxl(folder: Path, *, force_zeros: bool, seed: int = 0) -> Path:
    """`folder`, filled with weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = StableDiffusionXLPipeline(
            unet=tiny_unet(
                cross_attention_dim=2 * CLIP_WIDTH,
                use_linear_projection=True,
                addition_embed_type="text_time",
                addition_time_embed_dim=TIME_WIDTH,
                projection_class_embeddings_input_dim=CLIP_WIDTH + 6 * TIME_WIDTH,
            ),
            scheduler=tiny_scheduler(),
            vae=kl_vae(latent_channels=4),
            text_encoder=CLIPTextModel(clip_config()),
            tokenizer=clip_tokenizer(),
            text_encoder_2=CLIPTextModelWithProjection(clip_config()),
            tokenizer_2=clip_tokenizer(),
            force_zeros_for_empty_prompt=force_zeros,
            add_watermarker=False,
        )
    pipeline.save_pretrained(folder)
    return folder


def _case(name: str, force_zeros: bool, guidance_scales: tuple[float, ...]) -> FamilyCase:
    return FamilyCase(
        name=name,
        family="sdxl",
        build=partial(build_tiny_sdxl, force_zeros=force_zeros),
        call=call_unet_pipeline,
        sampling=sampling_params(num_steps=5, height=32, width=64, eta=0.0),
        prompts=prompts("a sign that says 374", "THE number 9, in red"),
        guidance_scales=guidance_scales,
        # The loop steps in coordinates of its own, so roundings differ; 1 / (1 - s) is up to 15.
        tolerance=1e-4,
        # Two steps of 1000 timesteps begin at timestep 501.
        lowest_start=0.6,
    )


CASES = [_case("sdxl", True, (1.0, 5.0)), _case("sdxl-empty-text", False, (5.0,))]
