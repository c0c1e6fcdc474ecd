"""A Stable Diffusion 3.5 folder of random weights, about 1 MB, built in a tenth of a second.

Every part of the real one is there (MMDiT with dual attention and qk-norm, two CLIPs, optionally a
T5, a VAE that shrinks by 8, tokenizers, scheduler), only narrow and shallow. Nothing is downloaded:
configurations and vocabularies are written out here. Out comes a folder that
`StableDiffusion3Pipeline` and `StableDiffusion3Model` both read.

    folder = build_tiny_sd3(tmp_path / "sd3", with_t5=True)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from builders import prompts, sampling_params
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from families.case import FamilyCase, uint8_of
from unirl.core.types import PromptRecord, SamplingParams

CLIP_WIDTH = 16
T5_WIDTH = 32
"""Also the width of the transformer's text input; at least twice CLIP_WIDTH, as in the real one."""

ALPHABET = [chr(code) for code in range(ord("!"), ord("~") + 1)]
CLIP_PIECES = [*ALPHABET, *(f"{c}</w>" for c in ALPHABET), "<|startoftext|>", "<|endoftext|>"]
CLIP_VOCABULARY = {piece: i for i, piece in enumerate(CLIP_PIECES)}
"""Every printable ASCII character is a token; `</w>` marks the last one of a word."""
T5_SPECIAL = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
T5_VOCABULARY = [*T5_SPECIAL, *((character, -3.0) for character in ALPHABET)]
"""Pieces with their log-probability; `▁` begins a word."""


def build_tiny_sd3(
    folder: Path,
    *,
    with_t5: bool = True,
    shift: float = 3.0,
    use_dynamic_shifting: bool = False,
    seed: int = 0,
) -> Path:
    """`folder`, filled with weights that depend on `seed` alone.

    Its images are multiples of 16 up to 128 pixels.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = StableDiffusion3Pipeline(
            transformer=_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(
                shift=shift, use_dynamic_shifting=use_dynamic_shifting
            ),
            vae=kl_vae(),
            text_encoder=_clip(),
            tokenizer=clip_tokenizer(),
            text_encoder_2=_clip(),
            tokenizer_2=clip_tokenizer(),
            text_encoder_3=t5_encoder() if with_t5 else None,  # type: ignore[arg-type]
            tokenizer_3=t5_tokenizer() if with_t5 else None,  # type: ignore[arg-type]
        )
    pipeline.save_pretrained(folder)
    return folder


def _transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=16,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=T5_WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=2 * CLIP_WIDTH,
        out_channels=16,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def kl_vae(latent_channels: int = 16) -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,  # type: ignore[arg-type]
        up_block_types=("UpDecoderBlock2D",) * 4,  # type: ignore[arg-type]
        block_out_channels=(8, 8, 8, 8),  # type: ignore[arg-type]
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5305,
        shift_factor=0.0609,
    )


def _clip() -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(clip_config())


def clip_config() -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(CLIP_VOCABULARY),
        hidden_size=CLIP_WIDTH,
        intermediate_size=32,
        projection_dim=CLIP_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=CLIP_VOCABULARY["<|startoftext|>"],
        eos_token_id=CLIP_VOCABULARY["<|endoftext|>"],
        pad_token_id=CLIP_VOCABULARY["<|endoftext|>"],
    )


def clip_tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer(CLIP_VOCABULARY, [], model_max_length=77)


def t5_encoder() -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=len(T5_VOCABULARY),
            d_model=T5_WIDTH,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
        )
    )


def t5_tokenizer() -> T5Tokenizer:
    return T5Tokenizer(T5_VOCABULARY, extra_ids=0)


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
        max_sequence_length=24,
        output_type=output_type,
    ).images
    return output if output_type == "latent" else uint8_of(output)


CASES = [
    FamilyCase(
        name="sd3",
        family="sd3",
        build=build_tiny_sd3,
        call=_call,
        sampling=sampling_params(num_steps=5, height=32, width=64, eta=0.0),
        prompts=prompts("a sign that says 374", "THE number 9, in red"),
        guidance_scales=(1.0, 4.5),
        # The last block's text stream ends there; only its keys and values reach the image.
        idle_targets=("transformer_blocks.1.attn.add_q_proj",),
    )
]
