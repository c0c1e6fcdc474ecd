"""The engine that returns recorded images of a prompt as if it had just sampled them.

With it, algorithms that need nothing but clean samples train on collected data: preference pairs,
with the scorer `preference` as reward. Prompts without images, as evaluations have them, are
sampled with the train stack's own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from unirl.config.catalog import ENGINES
from unirl.core.components import Movable
from unirl.core.errors import RolloutError
from unirl.core.types import Rollout, RolloutRequest, Trajectory
from unirl.data.recorded import images_of
from unirl.models.base import DiffusionModel
from unirl.rollout.engine import RolloutEngine
from unirl.rollout.trainside import TrainsideEngine

LARGEST_STRETCH = 0.02
"""By which the width of an image may be stretched against its height."""


class RecordedEngine(RolloutEngine):
    """Image g of a prompt's metadata.images is its sample g; there are no stochastic steps."""

    capabilities = ENGINES["recorded"].capabilities

    def __init__(
        self,
        model: DiffusionModel,
        forward_batch_size: int,
        device: torch.device,
        train_version: Callable[[], int],
        gathered: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """As of `TrainsideEngine`, which samples where there are no images."""
        self._model = model
        self._batch_size = forward_batch_size
        self._sampling = TrainsideEngine(model, forward_batch_size, device, train_version, gathered)

    @property
    def parts(self) -> Sequence[Movable]:
        return ()

    def generate(self, request: RolloutRequest) -> Rollout:
        """Raises RolloutError for images that cannot be read, of another shape than the samples, or
        too few or too many for the request."""
        if not any(images_of(record) for record in request.prompts.records):
            return self._sampling.generate(request)
        if request.num_sde_steps or request.kept_steps:
            raise RolloutError(
                "recorded images have no denoising steps, but the algorithm asks for some. Set "
                "sampling.eta=0 and an algorithm on clean samples: algorithm.path=diffusion_dpo."
            )
        return self._recorded(request, read_images(request))

    @torch.no_grad()
    def _recorded(self, request: RolloutRequest, images: Tensor) -> Rollout:
        per_sample = torch.arange(len(request.prompts)).repeat_interleave(
            request.samples_per_prompt
        )
        records, sampling = request.prompts.records, request.sampling
        negative = self._model.encode_negative(records, sampling)
        parts = images.split(self._batch_size or len(images))
        return Rollout(
            request,
            without_steps(torch.cat([self._model.latents_of(part) for part in parts])),
            self._model.encode(records, sampling).select(per_sample),
            None if negative is None else negative.select(per_sample),
            images,
            request.sigmas,
        )


def without_steps(final_latents: Tensor) -> Trajectory:
    """Of B samples whose clean ends [B, *latent] are all that is known."""
    batch = len(final_latents)
    empty = final_latents.new_empty((batch, 0, *final_latents.shape[1:]))
    return Trajectory(
        latents=empty,
        next_latents=empty,
        log_probs=final_latents.new_empty((batch, 0)),
        steps=torch.empty((batch, 0), dtype=torch.int64, device=final_latents.device),
        kept_latents=empty,
        final_latents=final_latents,
    )


def read_images(request: RolloutRequest) -> Tensor:
    """[B, 3, H, W] uint8 of all samples of a request, at its size."""
    sampling, per_prompt = request.sampling, request.samples_per_prompt
    images = []
    for record in request.prompts.records:
        paths = images_of(record)
        if len(paths) != per_prompt:
            raise RolloutError(
                f"prompt {record.text!r} names {len(paths)} images for {per_prompt} samples. "
                "Set sampling.samples_per_prompt to their number, the same for all prompts."
            )
        images += [read_image(Path(path), sampling.height, sampling.width) for path in paths]
    return torch.stack(images)


def read_image(path: Path, height: int, width: int) -> Tensor:
    """[3, height, width] uint8 of an image file, resized (Lanczos) when it has another size."""
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise RolloutError(f"the recorded image {path} cannot be read: {error}") from error
    if abs(image.width * height / (image.height * width) - 1) > LARGEST_STRETCH:
        raise RolloutError(
            f"the recorded image {path} is {image.width} x {image.height}, another shape than the "
            f"{width} x {height} of the samples. Crop it, or set sampling.height and width."
        )
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
