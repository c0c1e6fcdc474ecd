"""Qwen-Image-Edit from release 2509 on (the "plus" pipeline): a text and up to three images.

The images are seen twice: small by Qwen2.5-VL, beside the text, and as clean latents of about a
megapixel each, which the network gets behind the noisy ones. What guidance leads away from keeps
them. All images of a run must have one aspect ratio, and all prompts equally many of them: the
network has one layout for a whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPlusPipeline,
    QwenImageTransformer2DModel,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as published
from PIL import Image
from torch import Tensor
from transformers import (
    BatchFeature,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
)

from unirl.core.errors import DataError, ModelError
from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.condition_images import image_sizes, open_images
from unirl.models.diffusers_folder import PipelineParts
from unirl.models.qwen_flow import EMPTY, QwenFlowModel, QwenTexts

IMAGE_TOKEN = "<|image_pad|>"


@dataclass(frozen=True)
class QwenEditConditioning(QwenTexts):
    """What the vision-language model says about B texts with K images each, and those images."""

    images: Tensor
    """[B, K, C, h, w] float32 clean latents."""


class ImageCounter:
    """Stands in for the image processor in plans: knows how many tokens an image is, and shows
    none, since the sizes inside the vision tower depend on values."""

    merge_size: ClassVar[int] = 2
    side: ClassVar[int] = 28
    """Pixels that a token stands for."""

    def get_number_of_image_patches(self, height: int, width: int) -> int:
        return round(height / self.side) * round(width / self.side) * self.merge_size**2

    def __call__(self, images: Sequence[Image.Image], **_: Any) -> BatchFeature:
        return BatchFeature({})


class QwenImageEditModel(QwenFlowModel):
    """The network of Qwen-Image, trained to edit."""

    parts: ClassVar = PipelineParts(
        family="qwen_image_edit",
        pipelines={"QwenImageEditPlusPipeline": QwenImageEditPlusPipeline},
        networks={"transformer": QwenImageTransformer2DModel},
        modules={
            "vae": AutoencoderKLQwenImage,
            "text_encoder": Qwen2_5_VLForConditionalGeneration,
        },
        # Only the part of the folder's processor that is for images: the whole needs torchvision.
        processors={"tokenizer": Qwen2Tokenizer, "processor": Qwen2VLImageProcessor},
        blank={"processor": ImageCounter},
        schedulers={"FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler},
    )

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[PromptRecord], sampling: SamplingParams
    ) -> QwenEditConditioning:
        """As the pipeline does for one prompt; at most max_sequence_length tokens of text.

        Raises DataError for images of different aspect ratios, and different numbers of them, and
        ModelError when max_sequence_length cuts images.
        """
        pictures = [open_images(prompt) for prompt in prompts]
        size = _latent_size(*pictures[0][0].size)
        for prompt, images in zip(prompts, pictures, strict=True):
            _require_fit(prompt, [image.size for image in images], size, len(pictures[0]))
        texts = self._texts(prompts, pictures)
        latents = torch.cat([self._latents(image, size) for images in pictures for image in images])
        images = latents.unflatten(0, (len(prompts), -1))
        return QwenEditConditioning(texts.prompt_embeds, texts.mask, images)

    def encode_negative(
        self, prompts: Sequence[PromptRecord], sampling: SamplingParams
    ) -> QwenEditConditioning | None:
        """The same images without a text."""
        if sampling.guidance_scale <= 1:
            return None
        return self.encode([replace(prompt, text=EMPTY) for prompt in prompts], sampling)

    def check_prompts(self, prompts: Sequence[PromptRecord], key: str) -> None:
        """Raise DataError for images that do not fit to those of the first prompt."""
        first = image_sizes(prompts[0])
        size = _latent_size(*first[0])
        try:
            for prompt in prompts:
                _require_fit(prompt, image_sizes(prompt), size, len(first))
        except DataError as error:
            raise DataError(f"{key}: {error}") from error

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, QwenEditConditioning)
        return self.answer(latents, sigma, conditioning, conditioning.images.unbind(1))

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> QwenEditConditioning:
        """With one image each, of the pictures' aspect ratio."""
        texts = self.example_texts(batch, generator)
        width, height = _latent_size(sampling.width, sampling.height)
        shape = self.latent_shape(replace(sampling, width=width, height=height))
        images = torch.randn(batch, 1, *shape, generator=generator)
        conditioning = QwenEditConditioning(texts.prompt_embeds, texts.mask, images)
        return conditioning.to(next(self.network.parameters()).device)

    def _texts(
        self, prompts: Sequence[PromptRecord], pictures: Sequence[Sequence[Image.Image]]
    ) -> QwenTexts:
        """What the vision-language model says about the texts and their images."""
        pipeline, encoder = self.pipeline, self.pipeline.text_encoder
        small = [[self._small(image) for image in images] for images in pictures]
        shown = [[self._num_tokens(image) for image in images] for images in small]
        opening = pipeline.prompt_template_encode_start_idx
        asked = pipeline.tokenizer(
            [
                pipeline.prompt_template_encode.format(_placeholders(counts) + prompt.text)
                for prompt, counts in zip(prompts, shown, strict=True)
            ],
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=opening + self.settings.max_sequence_length + max(map(sum, shown)),
            return_tensors="pt",
        ).to(encoder.device)
        everything = [image for images in small for image in images]
        seen = pipeline.processor(images=everything, return_tensors="pt").to(encoder.device)
        self._require_all_image_tokens(asked.input_ids, shown, seen)
        # The pipeline tells no token types, so transformers 5 counts positions in one dimension.
        states = encoder.model(
            input_ids=asked.input_ids,
            attention_mask=asked.attention_mask,
            use_cache=False,
            **seen,
        ).last_hidden_state
        mask = asked.attention_mask[:, opening:].bool()
        return QwenTexts(states[:, opening:] * mask.unsqueeze(-1), mask)

    def _require_all_image_tokens(
        self, ids: Tensor, shown: Sequence[Sequence[int]], seen: BatchFeature
    ) -> None:
        """Raise ModelError where a text was cut within its images; plans show none."""
        if not seen:
            return
        there = (ids == self.pipeline.text_encoder.config.image_token_id).sum(dim=1).tolist()
        for found, counts in zip(there, shown, strict=True):
            if found != sum(counts):
                raise ModelError(
                    f"model.max_sequence_length={self.settings.max_sequence_length} cuts the "
                    f"{len(counts)} images of a prompt: {found} of their {sum(counts)} tokens are "
                    "left. The words that number the images count too. Raise it."
                )

    def _small(self, image: Image.Image) -> Image.Image:
        """As the vision-language model gets it."""
        width, height = published.calculate_dimensions(
            published.CONDITION_IMAGE_SIZE, image.width / image.height
        )
        return self.pipeline.image_processor.resize(image, height, width)

    def _num_tokens(self, image: Image.Image) -> int:
        processor = self.pipeline.processor
        num_patches = processor.get_number_of_image_patches(image.height, image.width)
        return num_patches // processor.merge_size**2

    def _latents(self, image: Image.Image, size: tuple[int, int]) -> Tensor:
        """[1, C, h, w]."""
        width, height = size
        scaled = self.pipeline.image_processor.preprocess(image, height, width)
        return self.clean_latents(scaled.to(self.pipeline.vae.device))


def _latent_size(width: int, height: int) -> tuple[int, int]:
    """(width, height) in pixels, of about a megapixel, at which an image becomes latents."""
    return published.calculate_dimensions(published.VAE_IMAGE_SIZE, width / height)


def _require_fit(
    prompt: PromptRecord,
    found: Sequence[tuple[int, int]],
    size: tuple[int, int],
    count: int,
) -> None:
    """Raise DataError for a prompt that has not `count` images that all become `size`."""
    if len(found) != count:
        raise DataError(
            f"prompt {prompt.text!r} comes with {len(found)} images and the first one with "
            f"{count}, but all share the network's batches. Give all prompts equally many."
        )
    for path, (width, height) in zip(prompt.images, found, strict=True):
        if _latent_size(width, height) != size:
            raise DataError(
                f"prompt {prompt.text!r}: its image {path} is {_told((width, height))}, which the "
                f"model is given as {_told(_latent_size(width, height))}, and the first image as "
                f"{_told(size)}, but all share the network's batches. Crop or pad the images to "
                "one aspect ratio."
            )


def _told(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def _placeholders(counts: Sequence[int]) -> str:
    """The images' places in the text, of so many tokens each."""
    return "".join(
        f"Picture {number}: <|vision_start|>{IMAGE_TOKEN * count}<|vision_end|>"
        for number, count in enumerate(counts, start=1)
    )
