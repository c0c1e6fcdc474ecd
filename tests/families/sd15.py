"""Stable Diffusion 1.5."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from builders import prompts, sampling_params
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextModel

from families.case import FamilyCase, uint8_of
from families.sd3 import CLIP_WIDTH, clip_config, clip_tokenizer, kl_vae
from unirl.core.types import PromptRecord, SamplingParams
from unirl.samplers.parametrisation import start_scale

WIDTHS = (16, 32)
"""Of the UNet's levels; each next one has half the height and width."""


def build_tiny_sd15(
    folder: Path, *, prediction_type: str = "epsilon", spacing: str = "leading", seed: int = 0
) -> Path:
    """`folder`, filled with weights that depend on `seed` alone. Without a safety checker."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = StableDiffusionPipeline(
            unet=tiny_unet(cross_attention_dim=CLIP_WIDTH),
            scheduler=tiny_scheduler(prediction_type, spacing),
            vae=kl_vae(latent_channels=4),
            text_encoder=CLIPTextModel(clip_config()),
            tokenizer=clip_tokenizer(),
            safety_checker=None,  # type: ignore[arg-type]
            feature_extractor=None,  # type: ignore[arg-type]
            requires_safety_checker=False,
        )
    pipeline.save_pretrained(folder)
    return folder


def tiny_scheduler(prediction_type: Any = "epsilon", spacing: Any = "leading") -> Any:
    """The published betas, with DDIM as solver, which ends on a clean image as our loop does."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=True,
        steps_offset=1,
        prediction_type=prediction_type,
        timestep_spacing=spacing,
        rescale_betas_zero_snr=spacing == "trailing",
    )


def tiny_unet(**changes: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=64,
        block_out_channels=WIDTHS,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=2,
        norm_num_groups=4,
        **changes,
    )


def call_unet_pipeline(
    pipeline: Any,
    prompts: Sequence[PromptRecord],
    sampling: SamplingParams,
    noise: Tensor,
    output_type: str,
) -> Any:
    # The pipeline starts from unit noise; ours is in the loop's coordinates.
    pipeline.scheduler.set_timesteps(sampling.num_inference_steps)
    alpha_cumprod = pipeline.scheduler.alphas_cumprod[pipeline.scheduler.timesteps[0]]
    alpha, sigma = alpha_cumprod.sqrt(), (1 - alpha_cumprod).sqrt()
    output = pipeline(
        prompt=[prompt.text for prompt in prompts],
        height=sampling.height,
        width=sampling.width,
        num_inference_steps=sampling.num_inference_steps,
        guidance_scale=sampling.guidance_scale,
        latents=noise / start_scale(float(sigma / (alpha + sigma))),
        output_type=output_type,
    ).images
    return output if output_type == "latent" else uint8_of(output)


def _case(name: str, lowest_start: float, prediction_type: str, spacing: str) -> FamilyCase:
    return FamilyCase(
        name=name,
        family="sd15",
        build=lambda folder: build_tiny_sd15(
            folder, prediction_type=prediction_type, spacing=spacing
        ),
        call=call_unet_pipeline,
        sampling=sampling_params(num_steps=5, height=32, width=64, eta=0.0),
        prompts=prompts("a sign that says 374", "THE number 9, in red"),
        guidance_scales=(1.0, 5.0),
        # The loop steps in coordinates of its own, so roundings differ; 1 / (1 - s) is up to 15.
        tolerance=1e-4,
        lowest_start=lowest_start,
    )


CASES = [
    # Two steps of 1000 timesteps begin at timestep 501.
    _case("sd15", 0.6, "epsilon", "leading"),
    # Stable Diffusion 2.1 with betas that leave no signal at the last timestep (arXiv:2305.08891).
    _case("sd15-v-prediction", 0.99, "v_prediction", "trailing"),
]
