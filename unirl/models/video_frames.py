"""Which frames of videos become pixels, as `sampling.decoded_frames` asks.

In go clean latents and a family's decoder, out come frames: as numbers with a gradient, or as
uint8, decoded one by one so that memory is that of one video.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unirl.core.errors import ModelError
from unirl.core.types import SamplingParams


def video_pixels(
    all_frames: Callable[[Tensor], Tensor],
    latents: Tensor,
    wanted: str | int,
    *,
    first_frame_stands_alone: bool,
) -> Tensor:
    """[B, F', 3, H, W] frames in [0, 1] of latents [B, C, f, h, w], as `chosen_frames` has them.

    all_frames: latents [B, C, f, h, w] -> [B, F, 3, H, W] in [0, 1]. Where the first frame does not
    depend on later latents (a causal decoder), "first" decodes nothing else.
    """
    if wanted == "first" and first_frame_stands_alone:
        latents = latents[:, :, :1]
    return chosen_frames(all_frames(latents), wanted)


def decoded_one_by_one(
    pixels: Callable[[Tensor, SamplingParams], Tensor], latents: Tensor, sampling: SamplingParams
) -> Tensor:
    """[B, F', 3, H, W] uint8: what `pixels` gives for latents [1, *latent], for all B of them."""
    videos = []
    for one in latents.split(1):
        videos.append((pixels(one, sampling) * 255).round().to(torch.uint8))
    return torch.cat(videos)


def chosen_frames(frames: Tensor, wanted: str | int) -> Tensor:
    """[B, F', 3, H, W] of all frames [B, F, 3, H, W]: "all", "first" or every n-th.

    Raises ModelError for anything else.
    """
    match wanted:
        case "all":
            return frames
        case "first":
            return frames[:, :1]
        case int(every):
            return frames[:, ::every]
        case _:
            raise ModelError(f"sampling.decoded_frames={wanted!r} is not all, first or a number.")


def num_latent_frames(sampling: SamplingParams, stride: int) -> int:
    """f of a video whose first frame has a latent of its own, the others one for each `stride`.

    Raises ModelError for a number of frames that does not fit.
    """
    if sampling.num_frames % stride != 1 % stride:
        below = (sampling.num_frames - 1) // stride * stride + 1
        raise ModelError(
            f"sampling.num_frames={sampling.num_frames}: this model takes 1 more than a multiple "
            f"of {stride}. Set sampling.num_frames to {below} or {below + stride}."
        )
    return (sampling.num_frames - 1) // stride + 1
