"""HunyuanVideo, text to video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from builders import prompts, sampling_params
from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import CLIPTextModel, LlamaConfig, LlamaModel, PreTrainedTokenizerFast

from families.case import FamilyCase, uint8_of_videos
from families.sd3 import CLIP_WIDTH, clip_config, clip_tokenizer
from unirl.core.types import PromptRecord, SamplingParams

LLAMA_WIDTH = 32
TEXT_TOKENS = 48


def build_tiny_hunyuan_video(folder: Path, *, seed: int = 0) -> Path:
    """`folder`, filled with weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = llama_tokenizer(DEFAULT_PROMPT_TEMPLATE["template"])
        pipeline = HunyuanVideoPipeline(
            transformer=_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
            vae=_vae(),
            text_encoder=_llama(len(tokenizer)),
            tokenizer=tokenizer,
            text_encoder_2=CLIPTextModel(clip_config()),
            tokenizer_2=clip_tokenizer(),
        )
    pipeline.save_pretrained(folder)
    return folder


def _transformer() -> HunyuanVideoTransformer3DModel:
    return HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        patch_size=2,
        text_embed_dim=LLAMA_WIDTH,
        pooled_projection_dim=CLIP_WIDTH,
        rope_axes_dim=(4, 6, 6),
    )


def _vae() -> AutoencoderKLHunyuanVideo:
    return AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),  # type: ignore[arg-type]
        layers_per_block=1,
        norm_num_groups=4,
    )


def _llama(vocabulary_size: int) -> LlamaModel:
    return LlamaModel(
        LlamaConfig(
            vocab_size=vocabulary_size,
            hidden_size=LLAMA_WIDTH,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )


def llama_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Llama 3's kind, which reads bytes: them, and the commonest pieces of the text."""
    learned = Tokenizer(BPE())
    learned.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    opening, end = "<|begin_of_text|>", "<|end_of_text|>"
    trainer = BpeTrainer(
        special_tokens=[opening, end, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    learned.train_from_iterator([text] * 3, trainer)
    learned.post_processor = TemplateProcessing(  # type: ignore[assignment]
        single=f"{opening} $A", special_tokens=[(opening, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=learned, bos_token=opening, eos_token=end, pad_token=end
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
        num_frames=sampling.num_frames,
        num_inference_steps=sampling.num_inference_steps,
        guidance_scale=sampling.guidance_scale,
        latents=noise,
        max_sequence_length=TEXT_TOKENS,
        output_type=output_type,
    ).frames
    return output if output_type == "latent" else uint8_of_videos(output)


CASES = [
    FamilyCase(
        name="hunyuan-video",
        family="hunyuan_video",
        build=build_tiny_hunyuan_video,
        call=_call,
        sampling=replace(sampling_params(num_steps=5, height=32, width=48, eta=0.0), num_frames=5),
        prompts=prompts("a cat runs", "THE number 9, in red, turns around"),
        guidance_scales=(1.0, 6.0),
        max_sequence_length=TEXT_TOKENS,
    )
]
