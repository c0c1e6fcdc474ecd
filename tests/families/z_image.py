"""Z-Image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from builders import prompts, sampling_params
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from torch import Tensor

from families.case import FamilyCase, uint8_of
from families.flux2 import WIDTH, chat_tokenizer, tiny_qwen3
from families.sd3 import kl_vae
from unirl.core.types import PromptRecord, SamplingParams

TOKENS = 96


def build_tiny_z_image(folder: Path, *, seed: int = 0) -> Path:
    """`folder`, filled with weights that depend on `seed` alone. Its images have up to 256 pixels
    on a side."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = ZImagePipeline(
            transformer=_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=kl_vae(latent_channels=4),
            text_encoder=tiny_qwen3(num_layers=3).model,
            tokenizer=chat_tokenizer(),  # type: ignore[arg-type]
        )
    pipeline.save_pretrained(folder)
    return folder


def _transformer() -> ZImageTransformer2DModel:
    network = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[4, 4, 8],
        axes_lens=[256, 16, 16],
    )
    # In place of tokens there are not enough of; zero as they are made, which trained ones are not.
    torch.nn.init.normal_(network.x_pad_token)
    torch.nn.init.normal_(network.cap_pad_token)
    return network


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
        max_sequence_length=TOKENS,
        output_type=output_type,
    ).images
    return output if output_type == "latent" else uint8_of(output)


CASES = [
    FamilyCase(
        name="z_image",
        family="z_image",
        build=build_tiny_z_image,
        call=_call,
        sampling=sampling_params(num_steps=5, height=32, width=64, eta=0.0),
        # Texts are filled up to multiples of 32 tokens: these two to different ones.
        prompts=prompts("a cat", "THE number 9, in red, on a wall of blue tiles"),
        guidance_scales=(0.0, 4.0),
        max_sequence_length=TOKENS,
    )
]
