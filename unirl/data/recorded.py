"""Prompts that name images: recorded samples, which a run can train on instead of its own.

    {"prompt": "a red cat", "metadata": {"images": ["cats/7a.png", "cats/7b.png"]}}

The first image of a record is the preferred one. `load_prompts` has made the paths absolute and
has seen that the files are there. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from unirl.core.errors import DataError
from unirl.core.types import PromptRecord


def images_of(record: PromptRecord) -> tuple[str, ...]:
    """Paths, the preferred image first; none where the record names no images."""
    return tuple(record.metadata.get("images", ()))


def require_recorded(records: Sequence[PromptRecord], num_images: int, key: str) -> None:
    """Raise DataError naming the first prompt that has not exactly `num_images` images."""
    for record in records:
        found = len(images_of(record))
        if found != num_images:
            raise DataError(
                f"{key}: prompt {record.text!r} names {found} images in metadata.images, but "
                f"rollout.engine=recorded needs sampling.samples_per_prompt={num_images} of each "
                "prompt, the preferred one first. Correct the record, or set "
                "sampling.samples_per_prompt."
            )


def require_unrecorded(records: Sequence[PromptRecord], key: str) -> None:
    """Raise DataError naming the first evaluation prompt that has images: they would be evaluated
    instead of the model."""
    for record in records:
        if images_of(record):
            raise DataError(
                f"{key}: prompt {record.text!r} names images, which would be looked at instead of "
                "what the model makes. Set data.eval to prompts without metadata.images, or "
                "eval_interval=0."
            )
