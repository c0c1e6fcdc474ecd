"""Wan 2.1 and 2.2, text to video, read from a local diffusers folder (see `wan_flow`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from torch import Tensor
from transformers import UMT5EncoderModel

from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.diffusers_folder import PipelineParts, RulesInFile
from unirl.models.wan_flow import SCHEDULERS, WanFlowModel


@dataclass(frozen=True)
class WanConditioning(Conditioning):
    """What the text encoder says about B prompts."""

    prompt_embeds: Tensor
    """[B, max_sequence_length, D] UMT5 tokens, zeros after a prompt's end."""


class WanModel(WanFlowModel):
    """The video transformer or both of them, UMT5 and the causal VAE."""

    parts: ClassVar = PipelineParts(
        family="wan",
        pipelines={"WanPipeline": WanPipeline},
        networks={"transformer": WanTransformer3DModel, "transformer_2": WanTransformer3DModel},
        modules={"vae": AutoencoderKLWan, "text_encoder": UMT5EncoderModel},
        processors={"tokenizer": RulesInFile},  # UMT5 is not read as T5
        schedulers=SCHEDULERS,
        optional=("transformer_2",),
    )

    @torch.no_grad()
    def encode(self, prompts: Sequence[PromptRecord], sampling: SamplingParams) -> WanConditioning:
        """By the pipeline's own method, in frozen_dtype on the text encoder's device."""
        return WanConditioning(self.encode_texts(prompts))

    def network_inputs(self, latents: Tensor, conditioning: Conditioning) -> dict[str, Tensor]:
        assert isinstance(conditioning, WanConditioning)
        return {
            "hidden_states": latents,
            # The embeddings may be bf16 beside a float32 network; widening them is exact.
            "encoder_hidden_states": conditioning.prompt_embeds.float(),
        }

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> WanConditioning:
        conditioning = WanConditioning(self.example_texts(batch, generator))
        return conditioning.to(next(self.network.parameters()).device)
