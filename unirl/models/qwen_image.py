"""Qwen-Image, read from a local diffusers folder.

Texts go through Qwen2.5-VL inside the pipeline's template, whose opening the network does not see.
Guidance is classifier-free with the length of every token's velocity kept (the pipeline's
`true_cfg_scale`); it costs a second answer of the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.diffusers_folder import PipelineParts
from unirl.models.qwen_flow import EMPTY, QwenFlowModel, QwenTexts


class QwenImageModel(QwenFlowModel):
    """The two-stream transformer, Qwen2.5-VL and the VAE."""

    parts: ClassVar = PipelineParts(
        family="qwen_image",
        pipelines={"QwenImagePipeline": QwenImagePipeline},
        networks={"transformer": QwenImageTransformer2DModel},
        modules={
            "vae": AutoencoderKLQwenImage,
            "text_encoder": Qwen2_5_VLForConditionalGeneration,
        },
        processors={"tokenizer": Qwen2Tokenizer},
        schedulers={"FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler},
    )

    @torch.no_grad()
    def encode(self, prompts: Sequence[PromptRecord], sampling: SamplingParams) -> QwenTexts:
        """As the pipeline's `encode_prompt`, of at most max_sequence_length tokens.

        Not by that method: it asks for values to find its shapes, which plans do not have, and it
        computes scores for every word of the vocabulary.
        """
        pipeline, encoder = self.pipeline, self.pipeline.text_encoder
        opening = pipeline.prompt_template_encode_start_idx
        asked = pipeline.tokenizer(
            [pipeline.prompt_template_encode.format(prompt.text) for prompt in prompts],
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=opening + self.settings.max_sequence_length,
            return_tensors="pt",
        ).to(encoder.device)
        states = encoder.model(
            input_ids=asked.input_ids, attention_mask=asked.attention_mask, use_cache=False
        ).last_hidden_state
        mask = asked.attention_mask[:, opening:].bool()
        return QwenTexts(states[:, opening:] * mask.unsqueeze(-1), mask)

    def encode_negative(
        self, prompts: Sequence[PromptRecord], sampling: SamplingParams
    ) -> QwenTexts | None:
        if sampling.guidance_scale <= 1:
            return None
        empty = self.encode([PromptRecord("", EMPTY)], sampling)
        return empty.select(torch.zeros(len(prompts), dtype=torch.int64))

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, QwenTexts)
        return self.answer(latents, sigma, conditioning)

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> QwenTexts:
        texts = self.example_texts(batch, generator)
        return texts.to(next(self.network.parameters()).device)
