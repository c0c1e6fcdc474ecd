"""Images of a checkpoint for prompts of one's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from unirl.algorithms.making import make_algorithm
from unirl.config import catalog
from unirl.config.components import is_own
from unirl.config.schema import RunConfig
from unirl.core.types import PromptBatch, PromptRecord, RolloutRequest
from unirl.distributed.ranks import OneRank
from unirl.models.base import DiffusionModel
from unirl.models.condition_images import require_images
from unirl.rollout.sampling import sample_with_model
from unirl.runtime.export import require_empty
from unirl.runtime.trained import put_weights, take_own_device, untrained_model
from unirl.tracking.activity import Activity, Count
from unirl.tracking.files import replacing
from unirl.tracking.media import save_before_after
from unirl.trainer.evaluation import film_strips
from unirl.trainer.requests import RequestFactory

FRAME_MILLISECONDS = 60
"""Of the GIF of a video, about 16 frames a second."""


@dataclass(frozen=True)
class Sampled:
    """One image or video that was written."""

    prompt: str
    sample: int
    file: Path


def sample_checkpoint(
    config: RunConfig,
    checkpoint: Path | None,
    prompts: Sequence[str],
    num_samples: int,
    output: Path,
    *,
    images: Sequence[Path],
    shadow: str | None,
    with_base: bool,
) -> list[Sampled]:
    """Sample each prompt as an evaluation of the run would, and write PNGs, or GIFs of videos.

    checkpoint: None samples with the model that a run of `config` begins with.
    num_samples: of each prompt, from noise that config.seed, prompt and place decide.
    images: what the model is given beside every prompt.
    output: new or empty.
    """
    require_empty(output)
    device, activity = take_own_device(config, OneRank()), Activity(config.logging.console)
    with activity.doing(f"loading {config.model.path}"):
        model = untrained_model(config, device)
    request = _request(config, model, prompts, num_samples, images)
    written: list[Sampled] = []
    before = None
    if checkpoint is None or with_base:
        with activity.counting("untrained model", len(request), "samples") as count:
            before = _sample(model, config, request, device, count)
        written += write_samples(before, request, output, "" if checkpoint is None else "base-")
    if checkpoint is not None:
        put_weights(model, config, checkpoint, shadow)
        with activity.counting(checkpoint.name, len(request), "samples") as count:
            after = _sample(model, config, request, device, count)
        written += write_samples(after, request, output, "")
        if before is not None:
            _write_pairs(before, after, request, output, config.logging.media_scale)
    lines = [
        json.dumps({"prompt": s.prompt, "sample": s.sample, "file": s.file.name}) for s in written
    ]
    with replacing(output / "samples.jsonl") as temporary:
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return written


def _request(
    config: RunConfig,
    model: DiffusionModel,
    prompts: Sequence[str],
    num_samples: int,
    images: Sequence[Path],
) -> RolloutRequest:
    files = tuple(str(path.absolute()) for path in images)
    records = tuple(PromptRecord(str(i), text, {}, files) for i, text in enumerate(prompts))
    if not is_own(config.model.family):
        require_images(records, catalog.MODELS[config.model.family].num_images, "--prompt")
    model.check_prompts(records, "--prompt")
    factory = RequestFactory(config, model, make_algorithm(config.algorithm))
    return factory.evaluation(PromptBatch(records), num_samples)


def _sample(
    model: DiffusionModel,
    config: RunConfig,
    request: RolloutRequest,
    device: torch.device,
    count: Count,
) -> Tensor:
    """[B, 3, H, W] uint8, of videos [B, F, 3, H, W]."""
    batch_size = config.rollout.forward_batch_size
    return sample_with_model(model, request, batch_size, device, count.reach).images


def write_samples(
    images: Tensor, request: RolloutRequest, output: Path, prefix: str
) -> list[Sampled]:
    """[B, 3, H, W] uint8 as PNGs, [B, F, 3, H, W] as GIFs, `<prefix><prompt>-<sample>`."""
    written = []
    for place, image in enumerate(images):
        prompt, sample = divmod(place, request.samples_per_prompt)
        suffix = "png" if image.ndim == 3 else "gif"
        file = output / f"{prefix}{prompt:02d}-{sample:02d}.{suffix}"
        with replacing(file) as temporary:
            _save(image, temporary)
        written.append(Sampled(request.prompts.texts[prompt], sample, file))
    return written


def _save(image: Tensor, file: Path) -> None:
    """[3, H, W] as PNG, [F, 3, H, W] as a GIF that repeats."""
    frames = image if image.ndim == 4 else image[None]
    first, *rest = (Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in frames)
    if image.ndim == 3:
        first.save(file)
    else:
        first.save(file, save_all=True, append_images=rest, duration=FRAME_MILLISECONDS, loop=0)


def _write_pairs(
    before: Tensor, after: Tensor, request: RolloutRequest, output: Path, scale: int
) -> None:
    """The untrained model's samples beside the trained one's."""
    old, new = (film_strips(images).permute(0, 2, 3, 1).numpy() for images in (before, after))
    captions = [record.text for record in request.sample_records]
    save_before_after(old, new, captions, output / "before_after.png", scale)
