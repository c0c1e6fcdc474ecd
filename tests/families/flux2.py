"""FLUX.2 dev and klein."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from builders import prompts, sampling_params
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from families.case import FamilyCase, uint8_of
from unirl.core.types import PromptRecord, SamplingParams

WIDTH = 16
"""Of the language models, which have as many layers as the pipelines look into."""
TOKENS = 64

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
VOCABULARY = {piece: i for i, piece in enumerate((*sorted(ByteLevel.alphabet()), *SPECIAL))}
"""Every byte is a token."""
CHAT_TEMPLATE = (
    "{% for message in messages if message.role != 'system' %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{{ message.content[0].text }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Without dev's message to the model: beside its 196 tokens here, a prompt would hardly count."""


def build_tiny_flux2(folder: Path, *, seed: int = 0) -> Path:
    """FLUX.2 dev in `folder`, filled with weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = Flux2Pipeline(
            transformer=_transformer(guided=True),
            scheduler=_scheduler(),
            vae=_vae(),
            text_encoder=_mistral(),
            # The whole processor needs torchvision, and is asked for nothing but tokens.
            tokenizer=chat_tokenizer(),  # type: ignore[arg-type]
        )
    pipeline.save_pretrained(folder)
    return folder


def build_tiny_flux2_klein(folder: Path, *, distilled: bool, seed: int = 0) -> Path:
    """FLUX.2 klein likewise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = Flux2KleinPipeline(
            transformer=_transformer(guided=False),
            scheduler=_scheduler(),
            vae=_vae(),
            text_encoder=tiny_qwen3(num_layers=28),
            tokenizer=chat_tokenizer(),
            is_distilled=distilled,
        )
    pipeline.save_pretrained(folder)
    return folder


def chat_tokenizer() -> Qwen2Tokenizer:
    special = {"pad_token": "<|endoftext|>", "additional_special_tokens": list(SPECIAL[1:])}
    return Qwen2Tokenizer(VOCABULARY, [], chat_template=CHAT_TEMPLATE, **special)  # type: ignore[arg-type]


def tiny_qwen3(num_layers: int) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(VOCABULARY),
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            initializer_range=0.3,
        )
    )


def _mistral() -> Mistral3ForConditionalGeneration:
    shape = {"num_attention_heads": 2, "head_dim": 8, "hidden_size": WIDTH, "intermediate_size": 32}
    text = {"num_hidden_layers": 31, "num_key_value_heads": 1, "vocab_size": len(VOCABULARY)}
    vision = {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    return Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config={"model_type": "mistral", "initializer_range": 0.3, **text, **shape},
            vision_config={"model_type": "pixtral", **vision, **shape},
            image_token_index=10,
        )
    )


def _transformer(*, guided: bool) -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * WIDTH,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guided,
    )


def _scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)


def _vae() -> AutoencoderKLFlux2:
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
    )
    vae.bn.running_mean.normal_()  # type: ignore[union-attr]
    vae.bn.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return vae


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
    if output_type != "latent":
        return uint8_of(output)
    if isinstance(pipeline, Flux2Pipeline):
        return output.transpose(1, 2).unflatten(2, noise.shape[2:])
    # klein hands back the VAE's own latents.
    statistics = pipeline.vae.bn
    std = (statistics.running_var + pipeline.vae.config.batch_norm_eps).sqrt()
    patches = torch.nn.functional.pixel_unshuffle(output, 2)
    return (patches - statistics.running_mean.view(-1, 1, 1)) / std.view(-1, 1, 1)


def _case(name: str, family: str, build: Any, guidance_scales: tuple[float, ...]) -> FamilyCase:
    return FamilyCase(
        name=name,
        family=family,
        build=build,
        call=_call,
        sampling=sampling_params(num_steps=5, height=32, width=64, eta=0.0),
        prompts=prompts("a sign that says 374", "THE number 9, in red"),
        guidance_scales=guidance_scales,
        max_sequence_length=TOKENS,
    )


CASES = [
    _case("flux2-dev", "flux2", build_tiny_flux2, (1.0, 4.0)),
    _case(
        "flux2-klein-base",
        "flux2_klein",
        partial(build_tiny_flux2_klein, distilled=False),
        (1.0, 4.0),
    ),
    _case("flux2-klein", "flux2_klein", partial(build_tiny_flux2_klein, distilled=True), (1.0,)),
]
