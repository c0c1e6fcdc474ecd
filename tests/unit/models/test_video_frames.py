"""Which frames of a video are decoded, and how many latents its frames need."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import sampling_params
from torch import Tensor

from unirl.core.errors import ModelError
from unirl.core.types import SamplingParams
from unirl.models.video_frames import decoded_one_by_one, num_latent_frames, video_pixels


def pixels(latents: Tensor) -> Tensor:
    """Each latent becomes two frames, the first one a single frame; grey as the latent says."""
    first, rest = latents[:, :1, :1], latents[:, :1, 1:].repeat_interleave(2, dim=2)
    return torch.cat([first, rest], dim=2).transpose(1, 2).expand(-1, -1, 3, -1, -1)


LATENTS = torch.arange(6.0).view(2, 1, 3, 1, 1).expand(2, 4, 3, 2, 2) / 255


@pytest.mark.parametrize(
    ("wanted", "greys"),
    [
        ("all", [[0, 1, 1, 2, 2], [3, 4, 4, 5, 5]]),
        ("first", [[0], [3]]),
        (2, [[0, 1, 2], [3, 4, 5]]),
        (9, [[0], [3]]),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_the_frames_that_were_asked_for_are_kept(
    wanted: str | int, greys: list[list[int]], alone: bool
) -> None:
    video = video_pixels(pixels, LATENTS, wanted, first_frame_stands_alone=alone)
    assert video.shape[2:] == (3, 2, 2)
    assert (255 * video[:, :, 0, 0, 0]).round().tolist() == greys


def test_samples_are_decoded_one_by_one_and_a_first_frame_without_the_rest() -> None:
    seen: list[torch.Size] = []

    def noted(latents: Tensor) -> Tensor:
        seen.append(latents.shape)
        return pixels(latents)

    def first(latents: Tensor, sampling: SamplingParams) -> Tensor:
        return video_pixels(noted, latents, "first", first_frame_stands_alone=True)

    video = decoded_one_by_one(first, LATENTS, sampling_params())
    assert seen == [(1, 4, 1, 2, 2)] * 2
    assert video.dtype == torch.uint8
    assert video[:, :, 0, 0, 0].tolist() == [[0], [3]]


def test_the_first_frame_has_a_latent_of_its_own() -> None:
    sampling = sampling_params()
    counts = [num_latent_frames(replace(sampling, num_frames=n), 4) for n in (1, 5, 81)]
    assert counts == [1, 2, 21]
    with pytest.raises(ModelError, match=r"sampling\.num_frames=80.*Set .* to 77 or 81"):
        num_latent_frames(replace(sampling, num_frames=80), 4)
