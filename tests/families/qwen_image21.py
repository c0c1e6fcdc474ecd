"""Qwen-Image 2.1."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from builders import prompts, sampling_params
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from torch import Tensor
from transformers import (
    ProcessorMixin,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)

from families.case import FamilyCase
from families.qwen_image import VOCABULARY, WIDTH, qwen_tokenizer
from unirl.core.types import PromptRecord, SamplingParams

LATENT_CHANNELS = 4
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content[0].text }}<|im_end|>\n{% endfor %}"
)


class StillsProcessor(Qwen3VLProcessor):
    """Without the part for videos, which needs torchvision."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None
    ) -> None:
        for name in ("image", "video"):
            token = f"<|{name}_pad|>"
            setattr(self, f"{name}_token", token)
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def build_tiny_qwen_image21(folder: Path, *, seed: int = 0) -> Path:
    """`folder`, filled with weights that depend on `seed` alone."""
    processor = StillsProcessor(Qwen2VLImageProcessor(), qwen_tokenizer(), CHAT_TEMPLATE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = QwenImage21Pipeline(
            transformer=_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=_vae(),
            text_encoder=_qwen_vl(),
            processor=processor,
        )
    pipeline.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["processor"] = ["transformers", "Qwen3VLProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def _transformer() -> QwenImage21Transformer2DModel:
    transformer = QwenImage21Transformer2DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
    )
    # Gates and values as drawn are so small that the text would hardly count.
    transformer.modulation[1].weight.data *= 4  # type: ignore[operator]
    for block in transformer.transformer_blocks:
        block.attn.to_v.weight.data *= 4  # type: ignore[union-attr, operator]
    return transformer


def _vae() -> AutoencoderKLQwenImage21:
    return AutoencoderKLQwenImage21(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.5126, 0.7721, -0.0631, 1.3506],
        latents_std=[3.2001, 3.2936, 3.4321, 3.0091],
    )


def _qwen_vl() -> Qwen3VLForConditionalGeneration:
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={
                "vocab_size": len(VOCABULARY),
                "hidden_size": WIDTH,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "max_position_embeddings": 2048,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e6,
                    "mrope_section": [2, 1, 1],
                    "mrope_interleaved": True,
                },
                "pad_token_id": VOCABULARY["<|endoftext|>"],
            },
            vision_config={
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": WIDTH,
                "deepstack_visual_indexes": [0],
                "num_position_embeddings": 16,
            },
            image_token_id=VOCABULARY["<|image_pad|>"],
            video_token_id=VOCABULARY["<|video_pad|>"],
            vision_start_token_id=VOCABULARY["<|vision_start|>"],
            vision_end_token_id=VOCABULARY["<|vision_end|>"],
        )
    )


def _call(
    pipeline: Any,
    prompts: Sequence[PromptRecord],
    sampling: SamplingParams,
    noise: Tensor,
    output_type: str,
) -> Any:
    """Prompt by prompt: in a batch the pipeline moves the picture behind the longest prompt."""
    outputs = [
        pipeline(
            prompt=prompt.text,
            negative_prompt="",
            true_cfg_scale=sampling.guidance_scale,
            height=sampling.height,
            width=sampling.width,
            num_inference_steps=sampling.num_inference_steps,
            latents=latents.flatten(2).transpose(1, 2),
            output_type="latent" if output_type == "latent" else "pt",
        ).images
        for prompt, latents in zip(prompts, noise.split(1), strict=True)
    ]
    if output_type == "latent":
        return torch.cat(outputs).transpose(1, 2).unflatten(2, noise.shape[2:])
    colours, alpha = torch.cat(outputs).split([3, 1], dim=1)
    return ((colours * alpha + 1 - alpha) * 255).round().to(torch.uint8)


CASES = [
    FamilyCase(
        name="qwen-image-2.1",
        family="qwen_image21",
        build=build_tiny_qwen_image21,
        call=_call,
        sampling=sampling_params(num_steps=5, height=64, width=128, eta=0.0),
        prompts=prompts("a sign that says 374", "THE number 9, in red"),
        guidance_scales=(1.0, 4.0),
        max_sequence_length=128,
        patched={"transformers.Qwen3VLProcessor": StillsProcessor},
    )
]
