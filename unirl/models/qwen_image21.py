"""Qwen-Image 2.1, text to image, read from a local diffusers folder.

One stream of tokens, first the text's, which see only those before them, then the picture's. Where
the picture stands depends on how long the text is, so the network answers one sample at a time: in
a padded batch a sample would depend on the others. Latents are [64, H/16, W/16], one token each;
the decoder's pictures have an alpha channel, which is laid over white.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen3VLForConditionalGeneration

from unirl.core.errors import ModelError
from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.base import LoadSettings
from unirl.models.diffusers_folder import DiffusersFolder, PipelineParts, read_tokenizer
from unirl.models.flow_match import linear_grid, resolution_shift, scheduler_sigmas
from unirl.models.on_meta import BlankTokenizer
from unirl.models.pipeline_model import PipelineModel
from unirl.models.qwen_flow import QwenTexts

VAE_FACTOR = 16
SLOT = 2
"""Tokens an image slot of the language model is wide and high: the picture must have whole ones."""


class TextProcessor:
    """The tokenizer of the folder's processor, where the pipeline looks for the whole of it, which
    needs torchvision."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, folder: Path, **_: Any) -> Self:
        return cls(read_tokenizer(folder, Qwen2Tokenizer))

    @classmethod
    def blank(cls) -> Self:
        return cls(BlankTokenizer())

    def apply_chat_template(self, messages: Any, **_: Any) -> list[list[int]]:
        """The tokens of one system message, which the network does not get."""
        (message,) = messages
        text = message["content"][0]["text"]
        return [self.tokenizer.encode(f"<|im_start|>system\n{text}<|im_end|>\n")]


class QwenImage21Model(PipelineModel):
    """The block-causal transformer, Qwen3-VL and the VAE."""

    parts: ClassVar = PipelineParts(
        family="qwen_image21",
        pipelines={"QwenImage21Pipeline": QwenImage21Pipeline},
        networks={"transformer": QwenImage21Transformer2DModel},
        modules={
            "vae": AutoencoderKLQwenImage21,
            "text_encoder": Qwen3VLForConditionalGeneration,
        },
        processors={"processor": TextProcessor},
        blank={"processor": TextProcessor.blank},
        schedulers={"FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler},
    )

    def __init__(
        self,
        folder: DiffusersFolder,
        networks: Mapping[str, Any],
        frozen: Mapping[str, Any] | None,
        settings: LoadSettings,
    ) -> None:
        # The pipeline asks its processor at once, also where no prompt will be encoded.
        if frozen is not None and frozen["processor"] is None:
            frozen = {**frozen, "processor": TextProcessor.blank()}
        super().__init__(folder, networks, frozen, settings)

    @torch.no_grad()
    def encode(self, prompts: Sequence[PromptRecord], sampling: SamplingParams) -> QwenTexts:
        """As the pipeline does for one prompt, of at most max_sequence_length tokens: the states of
        the language model's last layer, before its norm. The empty text is a space."""
        pipeline, encoder = self.pipeline, self.pipeline.text_encoder
        opening = pipeline._drop_idx
        asked = pipeline.processor.tokenizer(
            [pipeline.prompt_template_t2i.format(prompt.text or " ") for prompt in prompts],
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=opening + self.settings.max_sequence_length,
            return_tensors="pt",
        ).to(encoder.device)
        norm = encoder.model.language_model.norm
        passing_by = norm.register_forward_hook(lambda module, given, _: given[0])
        try:
            states = encoder.model(
                input_ids=asked.input_ids, attention_mask=asked.attention_mask, use_cache=False
            ).last_hidden_state
        finally:
            passing_by.remove()
        mask = asked.attention_mask[:, opening:].bool()
        return QwenTexts(states[:, opening:] * mask.unsqueeze(-1), mask)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, QwenTexts)
        lengths: list[int] = conditioning.mask.sum(dim=1).tolist()
        if not all(lengths):
            raise ModelError(
                "Qwen-Image 2.1 was told a text without a token and has no answer to it. A mask "
                "must have at least one True in each row."
            )
        embeds = conditioning.prompt_embeds.float()
        answers = [
            self._answer(latents[row, None], sigma[row, None], embeds[row, None, :length])
            for row, length in enumerate(lengths)
        ]
        return torch.cat(answers)

    def _answer(self, latents: Tensor, sigma: Tensor, embeds: Tensor) -> Tensor:
        """[1, C, h, w], for embeds [1, L, D] without padding."""
        _, _, height, width = latents.shape
        num_slots = height * width // SLOT**2
        is_picture = torch.arange(embeds.shape[1] + num_slots, device=latents.device)
        with self.arithmetic(latents):
            (velocity,) = self.network(
                hidden_states=latents.flatten(2).transpose(1, 2),
                timestep=sigma,
                encoder_hidden_states=embeds,
                img_shapes=[[(1, height, width)]],
                img_mask=(is_picture >= embeds.shape[1])[None],
                return_dict=False,
            )
        own = velocity[:, -height * width :].float()
        return own.transpose(1, 2).unflatten(2, (height, width))

    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        vae = self.pipeline.vae
        mean, std = self._latent_statistics()
        scaled = latents.unsqueeze(2).to(vae.dtype) * std + mean
        decoded = vae.decode(scaled, return_dict=False)[0][:, :, 0]
        picture = self.pipeline.image_processor.postprocess(decoded, output_type="pt").float()
        colours, alpha = picture.split([3, 1], dim=1)
        return colours * alpha + (1 - alpha)

    @torch.no_grad()
    def latents_of(self, images: Tensor) -> Tensor:
        vae = self.pipeline.vae
        mean, std = self._latent_statistics()
        scaled = images.to(vae.device).float() / 127.5 - 1
        opaque = torch.cat([scaled, torch.ones_like(scaled[:, :1])], dim=1)
        mode = vae.encode(opaque.unsqueeze(2).to(vae.dtype)).latent_dist.mode()
        return ((mode - mean) / std)[:, :, 0].float()

    def latent_shape(self, sampling: SamplingParams) -> tuple[int, ...]:
        self.require_multiple(
            sampling, VAE_FACTOR * SLOT, f"VAE factor {VAE_FACTOR} x slots of {SLOT} tokens"
        )
        channels = self.folder.config("transformer")["in_channels"]
        return (channels, sampling.height // VAE_FACTOR, sampling.width // VAE_FACTOR)

    def sigmas(self, sampling: SamplingParams) -> tuple[float, ...]:
        """The pipeline's own: the folder's sample_sigmas where it has some, else T equal levels,
        then the scheduler's shift.

        Raises ModelError for another number of steps than the folder's levels.
        """
        num_steps, grid = sampling.num_inference_steps, self.folder.index.get("sample_sigmas")
        if grid is not None and len(grid) != num_steps:
            raise ModelError(
                f"sampling.num_inference_steps={num_steps}, but model.path={self.folder.path} has "
                f"{len(grid)} noise levels of its own (sample_sigmas). Set it to that, or "
                "sampling.sigma_schedule=linear."
            )
        _, height, width = self.latent_shape(sampling)
        return scheduler_sigmas(
            self.scheduler,
            num_steps,
            mu=resolution_shift(self.scheduler.config, height * width),
            grid=grid or linear_grid(num_steps),
        )

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> QwenTexts:
        length = self.settings.max_sequence_length
        width = self.folder.config("transformer")["context_in_dim"]
        texts = QwenTexts(
            torch.randn(batch, length, width, generator=generator),
            torch.ones(batch, length, dtype=torch.bool),
        )
        return texts.to(next(self.network.parameters()).device)

    def _latent_statistics(self) -> tuple[Tensor, Tensor]:
        """(mean, std) [1, C, 1, 1, 1] of the VAE's latents."""
        vae = self.pipeline.vae
        mean = torch.tensor(vae.config["latents_mean"]).view(1, -1, 1, 1, 1)
        std = torch.tensor(vae.config["latents_std"]).view(1, -1, 1, 1, 1)
        return mean.to(vae.device, vae.dtype), std.to(vae.device, vae.dtype)
