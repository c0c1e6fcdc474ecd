"""Kontext's images: one a prompt, all of one size, and the edit depends on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families.case import picture_file
from families.flux_kontext import CASES, SIZES

from unirl.core.errors import DataError
from unirl.core.types import PromptRecord
from unirl.models.base import DiffusionModel

(CASE,) = CASES
WIDE, LARGE = CASE.prompts
TALL = PromptRecord("2", "make it tall", images=(picture_file("kontext-tall", 40, 90),))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiffusionModel:
    monkeypatch.setattr(SIZES, CASE.patched[SIZES])
    return CASE.load(CASE.build(tmp_path))


def test_images_become_latents_of_the_nearest_trained_size(model: DiffusionModel) -> None:
    assert vars(model.encode([WIDE, LARGE], CASE.sampling))["image"].shape == (2, 4, 4, 6)
    assert vars(model.encode([TALL], CASE.sampling))["image"].shape == (1, 4, 8, 4)


def test_the_answer_depends_on_the_image(model: DiffusionModel) -> None:
    other = replace(WIDE, images=LARGE.images)
    told = model.encode([WIDE, other], CASE.sampling)
    latents = torch.randn(1, *model.latent_shape(CASE.sampling)).expand(2, -1, -1, -1)
    first, second = model.velocity(latents, torch.full((2,), 0.5), told)
    assert (first - second).abs().max() > 1e-3


def test_images_of_different_shapes_are_refused_by_name(model: DiffusionModel) -> None:
    with pytest.raises(
        DataError, match=r"data.train: .*make it tall.*kontext-tall.*40 x 90.*32 x 64"
    ):
        model.check_prompts([WIDE, LARGE, TALL], "data.train")
    with pytest.raises(DataError, match="make it tall"):
        model.encode([WIDE, TALL], CASE.sampling)


@pytest.mark.parametrize("images", [(), WIDE.images * 2])
def test_a_prompt_has_exactly_one_image(model: DiffusionModel, images: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match="exactly 1"):
        model.encode([WIDE, replace(WIDE, images=images)], CASE.sampling)
