"""Qwen-Image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from builders import prompts, sampling_params
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from families.case import FamilyCase, uint8_of
from families.sd3 import ALPHABET
from unirl.core.types import PromptRecord, SamplingParams
from unirl.models.flux import packed, unpacked
from unirl.models.qwen_flow import EMPTY

WIDTH = 32
"""Of the text encoder, and of the transformer's text input."""
LATENT_CHANNELS = 4

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
]
LINE_END, SPACE = "Ċ", "Ġ"
"""How a byte-level vocabulary writes them."""
VOCABULARY = {piece: i for i, piece in enumerate([*ALPHABET, SPACE, LINE_END, *SPECIAL])}
"""Every printable ASCII character is a token."""


def build_tiny_qwen_image(folder: Path, *, seed: int = 0) -> Path:
    """`folder`, filled with weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = QwenImagePipeline(
            transformer=qwen_transformer(),
            scheduler=qwen_scheduler(),
            vae=qwen_vae(),
            text_encoder=qwen_vl(),
            tokenizer=qwen_tokenizer(),
        )
    pipeline.save_pretrained(folder)
    return folder


def qwen_transformer(**changes: Any) -> QwenImageTransformer2DModel:
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
        **changes,
    )
    # Most tokens are the template's: what the prompt's few say would hardly count.
    for block in transformer.transformer_blocks:
        block.attn.add_v_proj.weight.data *= 8  # type: ignore[union-attr, operator]
    return transformer


def qwen_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """As published."""
    return FlowMatchEulerDiscreteScheduler(
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def qwen_vae() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1, 1, 1],  # type: ignore[arg-type]
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[-0.7571, -0.7089, -0.9113, 0.1075],
        latents_std=[2.8184, 1.4541, 2.3275, 2.6558],
    )


def qwen_vl() -> Qwen2_5_VLForConditionalGeneration:
    """A tower for images of 14-pixel patches and a language model, two layers each."""
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": len(VOCABULARY),
                "hidden_size": WIDTH,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 2048,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e6,
                    "mrope_section": [1, 1, 2],
                },
                "bos_token_id": VOCABULARY["<|endoftext|>"],
                "eos_token_id": VOCABULARY["<|im_end|>"],
                "pad_token_id": VOCABULARY["<|endoftext|>"],
            },
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": WIDTH,
                "fullatt_block_indexes": [1],
            },
            image_token_id=VOCABULARY["<|image_pad|>"],
            video_token_id=VOCABULARY["<|video_pad|>"],
            vision_start_token_id=VOCABULARY["<|vision_start|>"],
            vision_end_token_id=VOCABULARY["<|vision_end|>"],
        )
    )


def qwen_tokenizer() -> Qwen2Tokenizer:
    return Qwen2Tokenizer(VOCABULARY, [], additional_special_tokens=SPECIAL)


def _call(
    pipeline: Any,
    prompts: Sequence[PromptRecord],
    sampling: SamplingParams,
    noise: Tensor,
    output_type: str,
) -> Any:
    output = pipeline(
        prompt=[prompt.text for prompt in prompts],
        negative_prompt=[EMPTY] * len(prompts),
        true_cfg_scale=sampling.guidance_scale,
        height=sampling.height,
        width=sampling.width,
        num_inference_steps=sampling.num_inference_steps,
        latents=packed(noise),
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        output_type=output_type,
    ).images
    return unpacked(output, *noise.shape[2:]) if output_type == "latent" else uint8_of(output)


MAX_SEQUENCE_LENGTH = 192
"""One token a character: behind the 34 that are dropped, most of the template is left too."""

LAST = "transformer_blocks.1"
"""The last block: its text stream ends there, and only its keys and values reach the image."""
IDLE_TARGETS = (f"{LAST}.attn.add_q_proj", f"{LAST}.attn.to_add_out")
UNTRAINED = tuple(
    f"{LAST}.{layer}.{part}"
    for layer in ("attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
    for part in ("weight", "bias")
)

CASES = [
    FamilyCase(
        name="qwen-image",
        family="qwen_image",
        build=build_tiny_qwen_image,
        call=_call,
        sampling=sampling_params(num_steps=5, height=32, width=64, eta=0.0),
        prompts=prompts("a sign that says 374", "THE number 9, in red"),
        guidance_scales=(1.0, 4.0),
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        idle_targets=IDLE_TARGETS,
        untrained=UNTRAINED,
    )
]
