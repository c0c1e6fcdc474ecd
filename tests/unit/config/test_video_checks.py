"""Frames: what a family cannot make, or would ignore, is an error of the recipe."""

from __future__ import annotations

from typing import Any

import pytest

from unirl.config.checks import problems
from unirl.config.schema import RunConfig

WAN = {"family": "wan", "path": "."}
MINIMAX_H3 = {"family": "minimax_h3", "path": "."}


def found(model: dict[str, Any], **blocks: dict[str, Any]) -> dict[str, str]:
    sampling = {"height": 16, "width": 32, **blocks.pop("sampling", {})}
    config = RunConfig.model_validate({"model": model, "sampling": sampling, **blocks})
    video = ("num_frames", "decoded_frames", "rollout.engine")
    return {p.key: p.message for p in problems(config) if p.key.endswith(video)}


@pytest.mark.parametrize("block", ["sampling", "eval_sampling"])
@pytest.mark.parametrize(
    ("model", "name", "value", "fragment"),
    [
        ({}, "num_frames", 5, "makes images"),
        ({}, "decoded_frames", "first", "makes images"),
        ({}, "decoded_frames", 4, "makes images"),
        (WAN, "num_frames", 6, "to 5 or 9"),
        (MINIMAX_H3, "num_frames", 125, "5 more than a multiple of 17, from 124 to 345. Set"),
        (MINIMAX_H3, "num_frames", 125, "to 124 or 141."),
        (MINIMAX_H3, "num_frames", 22, "to 124."),
        (MINIMAX_H3, "num_frames", 362, "to 345."),
    ],
)
def test_what_does_not_fit_the_family_is_named(
    block: str, model: dict[str, Any], name: str, value: Any, fragment: str
) -> None:
    told = found(model, **{block: {name: value}})
    assert fragment in told[f"{block}.{name}"]


def test_videos_of_a_fitting_length_and_images_pass() -> None:
    assert not found({})
    assert not found(WAN, sampling={"num_frames": 81, "decoded_frames": 4})
    assert not found(WAN, sampling={"num_frames": 5}, eval_sampling={"num_frames": 81})


def test_recorded_samples_are_images() -> None:
    assert "makes videos" in found(WAN, rollout={"engine": "recorded"})["rollout.engine"]
