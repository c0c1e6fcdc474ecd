"""Wan 2.1 and 2.2, text to video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from builders import prompts, sampling_params
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from families.case import FamilyCase, uint8_of_videos
from families.sd3 import ALPHABET, T5_WIDTH
from unirl.core.types import PromptRecord, SamplingParams

BOUNDARY = 0.875
"""Of the published Wan 2.2 T2V: two of five steps at flow_shift 3 are above."""
UMT5_VOCABULARY = [
    *((special, 0.0) for special in ("<pad>", "</s>", "<s>", "<unk>")),
    *((f"<0x{byte:02X}>", -20.0) for byte in range(256)),
    *((character, -3.0) for character in ("▁", *ALPHABET)),
]


def build_tiny_wan(
    folder: Path, *, scheduler: str = "unipc", with_experts: bool = False, seed: int = 0
) -> Path:
    """`folder`, filled with weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = WanPipeline(
            transformer=wan_transformer(),
            scheduler=wan_scheduler(scheduler),  # type: ignore[arg-type]
            vae=wan_vae(),
            text_encoder=umt5_encoder(),
            tokenizer=umt5_tokenizer(),  # type: ignore[arg-type]
            transformer_2=wan_transformer() if with_experts else None,
            boundary_ratio=BOUNDARY if with_experts else None,
        )
    pipeline.save_pretrained(folder)
    return folder


def wan_transformer(**changes: Any) -> WanTransformer3DModel:
    values: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": T5_WIDTH,
        "freq_dim": 32,
        "ffn_dim": 32,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    return WanTransformer3DModel(**{**values, **changes})


def wan_scheduler(name: str) -> Any:
    if name == "euler":
        return FlowMatchEulerDiscreteScheduler(shift=3.0)
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


def wan_vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)  # type: ignore[arg-type]


def umt5_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, and bytes of all others; not T5's, which knows neither bytes nor this <unk>."""
    learned = Tokenizer(Unigram(UMT5_VOCABULARY, unk_id=3, byte_fallback=True))
    learned.pre_tokenizer = Metaspace()  # type: ignore[assignment]
    learned.post_processor = TemplateProcessing(  # type: ignore[assignment]
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=learned, eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


def umt5_encoder() -> UMT5EncoderModel:
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(UMT5_VOCABULARY),
            d_model=T5_WIDTH,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
        )
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
        guidance_scale_2=sampling.low_noise_guidance_scale,
        latents=noise,
        max_sequence_length=24,
        output_type=output_type,
    ).frames
    return output if output_type == "latent" else uint8_of_videos(output)


def load_both_adapters(pipeline: Any, folder: Path) -> None:
    pipeline.load_lora_weights(folder)
    pipeline.load_lora_weights(folder / "transformer_2", load_into_transformer_2=True)


def _case(name: str, build: Any, **sampling: Any) -> FamilyCase:
    return FamilyCase(
        name=name,
        family="wan",
        build=build,
        call=_call,
        sampling=replace(
            sampling_params(num_steps=5, height=32, width=48, eta=0.0), num_frames=5, **sampling
        ),
        prompts=prompts("a cat runs", "THE number 9, in red, turns around"),
        guidance_scales=(1.0, 4.5),
    )


CASES = [
    _case("wan2.1", build_tiny_wan, solver="unipc"),
    _case("wan2.1-euler", partial(build_tiny_wan, scheduler="euler")),
    replace(
        _case(
            "wan2.2",
            partial(build_tiny_wan, with_experts=True),
            solver="unipc",
            low_noise_guidance_scale=3.0,
        ),
        load_adapter=load_both_adapters,
    ),
]
