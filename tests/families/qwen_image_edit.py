"""Qwen-Image-Edit 2509 and 2511, with one image and with two."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from builders import sampling_params
from diffusers import QwenImageEditPlusPipeline
from torch import Tensor
from transformers import ProcessorMixin, Qwen2VLImageProcessor, Qwen2VLProcessor

from families.case import FamilyCase, picture_file, uint8_of
from families.qwen_image import (
    IDLE_TARGETS,
    UNTRAINED,
    qwen_scheduler,
    qwen_tokenizer,
    qwen_transformer,
    qwen_vae,
    qwen_vl,
)
from unirl.core.types import PromptRecord, SamplingParams
from unirl.models.condition_images import open_images
from unirl.models.flux import packed, unpacked
from unirl.models.qwen_flow import EMPTY

PIPELINE = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus"


class StillsProcessor(Qwen2VLProcessor):
    """Without the part for videos, which needs torchvision."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None
    ) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def build_tiny_qwen_image_edit(folder: Path, *, zero_cond_t: bool, seed: int = 0) -> Path:
    """`folder`, filled with weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = QwenImageEditPlusPipeline(
            transformer=qwen_transformer(zero_cond_t=zero_cond_t),
            scheduler=qwen_scheduler(),
            vae=qwen_vae(),
            text_encoder=qwen_vl(),
            tokenizer=qwen_tokenizer(),
            processor=StillsProcessor(Qwen2VLImageProcessor(), qwen_tokenizer()),
        )
    pipeline.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["processor"] = ["transformers", "Qwen2VLProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def _call(
    pipeline: Any,
    prompts: Sequence[PromptRecord],
    sampling: SamplingParams,
    noise: Tensor,
    output_type: str,
) -> Any:
    """Prompt by prompt: the pipeline takes one at a time."""
    outputs = [
        pipeline(
            image=open_images(prompt),
            prompt=prompt.text,
            negative_prompt=EMPTY,
            true_cfg_scale=sampling.guidance_scale,
            height=sampling.height,
            width=sampling.width,
            num_inference_steps=sampling.num_inference_steps,
            latents=packed(latents),
            output_type=output_type,
        ).images
        for prompt, latents in zip(prompts, noise.split(1), strict=True)
    ]
    if output_type == "latent":
        return unpacked(torch.cat(outputs), *noise.shape[2:])
    return uint8_of([picture for pictures in outputs for picture in pictures])


def _case(name: str, zero_cond_t: bool, *images: tuple[str, ...]) -> FamilyCase:
    texts = ("make the sign say 374", "IN RED, please")
    return FamilyCase(
        name=name,
        family="qwen_image_edit",
        build=partial(build_tiny_qwen_image_edit, zero_cond_t=zero_cond_t),
        call=_call,
        sampling=sampling_params(num_steps=5, height=32, width=64, eta=0.0),
        prompts=tuple(
            PromptRecord(text, text, images=files)
            for text, files in zip(texts, images, strict=True)
        ),
        guidance_scales=(1.0, 4.0),
        max_sequence_length=320,
        idle_targets=IDLE_TARGETS,
        untrained=UNTRAINED,
        patched={
            "transformers.Qwen2VLProcessor": StillsProcessor,
            # 96 x 32 pixels instead of a megapixel, and 64 x 32 for the language model.
            f"{PIPELINE}.VAE_IMAGE_SIZE": 64 * 64,
            f"{PIPELINE}.CONDITION_IMAGE_SIZE": 56 * 56,
        },
    )


def _picture(name: str) -> str:
    return picture_file(f"qwen-{name}", width=80, height=40)


CASES = [
    _case("qwen-image-edit-2509", False, (_picture("a"),), (_picture("b"),)),
    _case(
        "qwen-image-edit-2511",
        True,
        (_picture("a"), _picture("b")),
        (_picture("c"), _picture("d")),
    ),
]
