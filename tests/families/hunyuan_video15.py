"""HunyuanVideo 1.5, text to video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from builders import prompts, sampling_params
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from torch import Tensor
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
)

from families.case import FamilyCase, uint8_of_videos
from families.flux2 import SPECIAL, VOCABULARY
from unirl.core.types import PromptRecord, SamplingParams
from unirl.models.lora_export import FILE_NAME

WIDTH, GLYPH_WIDTH = 32, 16
CHAT_TEMPLATE = "{{ '~' * 108 }}{{ messages[1].content }}<|im_end|>"
"""The pipeline cuts 108 tokens off, as many as its message to the model is long with the published
tokenizer; here every byte is a token."""
TEXT_TOKENS, GLYPH_TOKENS, IMAGE_TOKENS = 48, 16, 8
LAST = "transformer_blocks.1"


def build_tiny_hunyuan_video15(folder: Path, *, seed: int = 0) -> Path:
    """`folder`, filled with weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = HunyuanVideo15Pipeline(
            transformer=_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
            vae=_vae(),
            text_encoder=_qwen(),
            tokenizer=_tokenizer(),
            text_encoder_2=_byt5(),
            tokenizer_2=ByT5Tokenizer(),
            guider=ClassifierFreeGuidance(guidance_scale=6.0),
        )
    pipeline.save_pretrained(folder)
    return folder


def _transformer() -> HunyuanVideo15Transformer3DModel:
    return HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=WIDTH,
        text_embed_2_dim=GLYPH_WIDTH,
        image_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
        task_type="t2v",
    )


def _vae() -> AutoencoderKLHunyuanVideo15:
    return AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8, 8),  # type: ignore[arg-type]
        layers_per_block=1,
    )


def _qwen() -> Qwen2_5_VLTextModel:
    return Qwen2_5_VLTextModel(
        Qwen2_5_VLTextConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [2, 3, 3],
            },
        )
    )


def _tokenizer() -> Qwen2Tokenizer:
    special: dict[str, Any] = {
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(SPECIAL[1:]),
    }
    return Qwen2Tokenizer(VOCABULARY, [], chat_template=CHAT_TEMPLATE, **special)


def _byt5() -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=len(ByT5Tokenizer()),
            d_model=GLYPH_WIDTH,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_heads=2,
        )
    )


def _call(
    pipeline: Any,
    prompts: Sequence[PromptRecord],
    sampling: SamplingParams,
    noise: Tensor,
    output_type: str,
) -> Any:
    pipeline.tokenizer_max_length = TEXT_TOKENS
    pipeline.tokenizer_2_max_length = GLYPH_TOKENS
    pipeline.vision_num_semantic_tokens = IMAGE_TOKENS
    pipeline.vae.use_slicing = True  # without it a batch does not fit its attention mask
    pipeline.guider = pipeline.guider.new(guidance_scale=sampling.guidance_scale)
    output = pipeline(
        prompt=[prompt.text for prompt in prompts],
        height=sampling.height,
        width=sampling.width,
        num_frames=sampling.num_frames,
        num_inference_steps=sampling.num_inference_steps,
        latents=noise,
        output_type=output_type,
    ).frames
    return output if output_type == "latent" else uint8_of_videos(output)


def _load_adapter(pipeline: Any, folder: Path) -> None:
    pipeline.transformer.load_lora_adapter(folder, weight_name=FILE_NAME)


CASES = [
    FamilyCase(
        name="hunyuan-video-1.5",
        family="hunyuan_video15",
        build=build_tiny_hunyuan_video15,
        call=_call,
        sampling=replace(sampling_params(num_steps=5, height=64, width=96, eta=0.0), num_frames=5),
        prompts=prompts("a cat runs", 'THE sign says "9", in red'),
        guidance_scales=(1.0, 6.0),
        max_sequence_length=TEXT_TOKENS,
        load_adapter=_load_adapter,
        # The text stream ends in the last block; only its keys and values reach the video.
        idle_targets=(f"{LAST}.attn.add_q_proj", f"{LAST}.attn.to_add_out"),
        untrained=tuple(
            f"{LAST}.{layer}.{kind}"
            for layer in ("attn.to_add_out", "ff_context.net.0.proj", "ff_context.net.2")
            for kind in ("weight", "bias")
        ),
        # 256 and 729 as published.
        patched={
            "unirl.models.hunyuan_video15.GLYPH_TOKENS": GLYPH_TOKENS,
            "unirl.models.hunyuan_video15.IMAGE_TOKENS": IMAGE_TOKENS,
        },
    )
]
