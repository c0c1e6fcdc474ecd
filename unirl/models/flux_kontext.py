"""FLUX.1 Kontext, which edits an image as a text says, read from a local diffusers folder.

The image is resized to the nearest of the sizes that Kontext was trained on, about a megapixel
each, and its clean latents go to the network behind the noisy ones. All images of a run must come
to one size: the network has one layout for a whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from diffusers import FluxKontextPipeline, FluxTransformer2DModel
from diffusers.pipelines.flux import pipeline_flux_kontext as published
from torch import Tensor

from unirl.core.errors import DataError
from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.condition_images import image_sizes, open_images, require_images
from unirl.models.diffusers_folder import PipelineParts
from unirl.models.flux import MODULES, PROCESSORS, SCHEDULERS, FluxConditioning, FluxFamily

ONE = range(1, 2)


@dataclass(frozen=True)
class FluxKontextConditioning(FluxConditioning):
    """What the network is told about B edits."""

    image: Tensor
    """[B, C, h, w] float32 clean latents of what is edited."""


class FluxKontextModel(FluxFamily):
    """FLUX.1's network, trained to edit. `true_cfg_scale` of its pipeline is 1 here."""

    parts: ClassVar = PipelineParts(
        family="flux_kontext",
        pipelines={"FluxKontextPipeline": FluxKontextPipeline},
        networks={"transformer": FluxTransformer2DModel},
        modules=MODULES,
        processors=PROCESSORS,
        schedulers=SCHEDULERS,
    )

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[PromptRecord], sampling: SamplingParams
    ) -> FluxKontextConditioning:
        """Raises DataError for a prompt without its one image, for a file that is none, and for
        images that come to different sizes."""
        self.check_prompts(prompts, "prompts")
        latents = torch.cat([self._latents(prompt) for prompt in prompts])
        return _edits(self.texts(prompts, sampling), latents)

    def check_prompts(self, prompts: Sequence[PromptRecord], key: str) -> None:
        """Raise DataError like `encode`, from the files' headers alone."""
        require_images(prompts, ONE, key)
        first = _trained_size(*image_sizes(prompts[0])[0])
        for prompt in prompts:
            found = image_sizes(prompt)[0]
            if _trained_size(*found) != first:
                raise DataError(
                    f"{key}: prompt {prompt.text!r}: its image {prompt.images[0]} is "
                    f"{_told(found)}, which the model is given as {_told(_trained_size(*found))}, "
                    f"and the first prompt's as {_told(first)}, but all share the network's "
                    "batches. Crop or pad the images to one aspect ratio."
                )

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, FluxKontextConditioning)
        return self.answer(latents, sigma, conditioning, [conditioning.image])

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> FluxKontextConditioning:
        """With images of the aspect ratio that is made."""
        width, height = _trained_size(sampling.width, sampling.height)
        channels, *made = self.latent_shape(sampling)
        factor = sampling.height // made[0]
        image = torch.randn(batch, channels, height // factor, width // factor, generator=generator)
        conditioning = _edits(self.example_texts(batch, sampling, generator), image)
        return conditioning.to(next(self.network.parameters()).device)

    def _latents(self, prompt: PromptRecord) -> Tensor:
        """[1, C, h, w]."""
        (image,) = open_images(prompt)
        width, height = _trained_size(*image.size)
        processor = self.pipeline.image_processor
        scaled = processor.preprocess(processor.resize(image, height, width), height, width)
        return self.clean_latents(scaled.to(self.pipeline.vae.device))


def _edits(texts: FluxConditioning, image: Tensor) -> FluxKontextConditioning:
    return FluxKontextConditioning(texts.prompt_embeds, texts.pooled, texts.guidance, image)


def _trained_size(width: int, height: int) -> tuple[int, int]:
    """(width, height) of the trained sizes whose aspect ratio is nearest."""
    sizes = published.PREFERRED_KONTEXT_RESOLUTIONS
    _, *nearest = min((abs(width / height - w / h), w, h) for w, h in sizes)
    return nearest[0], nearest[1]


def _told(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
