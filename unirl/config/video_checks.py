"""Keys of videos: frames the model can make, and what counts for videos alone."""

from __future__ import annotations

from collections.abc import Iterator

from unirl.config import catalog
from unirl.config.families import ModelEntry
from unirl.config.guidance_checks import sampling_blocks
from unirl.config.problem import Problem
from unirl.config.schema import EvalSamplingConfig, RunConfig, SamplingConfig


def frames(config: RunConfig) -> Iterator[Problem]:
    """Numbers of frames that the family makes, in training and at evaluation."""
    family = config.model.family
    if family not in catalog.MODELS:
        return  # the user's own family: only it knows
    for block, sampling in sampling_blocks(config):
        if catalog.MODELS[family].frame_stride is None:
            yield from _of_images(block, sampling, family)
        else:
            yield from _of_videos(block, sampling, catalog.MODELS[family], family)


def recorded_videos(config: RunConfig) -> Iterator[Problem]:
    """Recorded samples are image files."""
    entry = catalog.MODELS.get(config.model.family)
    if config.rollout.engine == "recorded" and entry is not None and entry.frame_stride is not None:
        yield Problem(
            "rollout.engine",
            f"is recorded, which reads images, but model.family={config.model.family} makes "
            "videos. Set rollout.engine=trainside.",
        )


def _of_images(
    block: str, sampling: SamplingConfig | EvalSamplingConfig, family: str
) -> Iterator[Problem]:
    if sampling.num_frames not in (None, 1):
        yield Problem(
            f"{block}.num_frames",
            f"is {sampling.num_frames}, but model.family={family} makes images. "
            f"Set {block}.num_frames=1.",
        )
    if sampling.decoded_frames not in (None, "all"):
        yield Problem(
            f"{block}.decoded_frames",
            f"is {sampling.decoded_frames}, but model.family={family} makes images. "
            f"Set {block}.decoded_frames=all.",
        )


def _of_videos(
    block: str, sampling: SamplingConfig | EvalSamplingConfig, entry: ModelEntry, family: str
) -> Iterator[Problem]:
    count, stride, over = sampling.num_frames, entry.frame_stride, entry.frames_over
    every = sampling.decoded_frames
    if isinstance(every, int) and count is not None and every >= count:
        yield Problem(
            f"{block}.decoded_frames",
            f"is {every}, so that of {count} frames only the first counts. Set it lower, or to "
            "first.",
        )
    if count is None or stride is None:
        return
    least, most = entry.min_frames, entry.max_frames or count + stride
    if (count - over) % stride == 0 and least <= count <= most:
        return
    below = (count - over) // stride * stride + over
    fitting = [frames for frames in (below, below + stride) if least <= frames <= most]
    nearest = " or ".join(map(str, fitting or [least if count < least else most]))
    bounds = f", from {least} to {most}" if entry.max_frames else ""
    yield Problem(
        f"{block}.num_frames",
        f"is {count}, but model.family={family} needs {over} more than a multiple of {stride}"
        f"{bounds}. Set {block}.num_frames to {nearest}.",
    )
