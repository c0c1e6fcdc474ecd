"""Condition images of Qwen-Image-Edit: what is refused, and that the network sees them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families.case import picture_file
from families.qwen_image_edit import CASES

from unirl.core.errors import DataError, ModelError
from unirl.core.types import PromptRecord
from unirl.models.base import DiffusionModel
from unirl.models.qwen_image_edit import QwenEditConditioning, QwenImageEditModel

CASE = CASES[0]
WIDE = picture_file("edit-wide", 80, 40)
OTHER_WIDE = picture_file("edit-other", 160, 80)
TALL = picture_file("edit-tall", 40, 80)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CASE.patched.items():
            patch.setattr(name, value)
        yield CASE.load(CASE.build(tmp_path_factory.mktemp("edit") / "folder"))


def edit(*images: str, text: str = "make it red") -> PromptRecord:
    return PromptRecord(text, text, images=images)


def test_images_of_one_aspect_ratio_share_a_batch(model: DiffusionModel) -> None:
    conditioning = model.encode([edit(WIDE), edit(OTHER_WIDE)], CASE.sampling)
    assert isinstance(conditioning, QwenEditConditioning)
    assert conditioning.images.shape[:2] == (2, 1)
    assert not torch.equal(conditioning.images[0], conditioning.images[1])


@pytest.mark.parametrize(
    ("second", "told"), [((TALL,), "40 x 80.*one aspect ratio"), ((WIDE, WIDE), "2 images.*1")]
)
def test_images_that_fit_no_batch_are_refused_before_and_while_sampling(
    model: DiffusionModel, second: tuple[str, ...], told: str
) -> None:
    prompts = [edit(WIDE), edit(*second, text="and green")]
    with pytest.raises(DataError, match=f"data.train: .*and green.*{told}"):
        model.check_prompts(prompts, "data.train")
    with pytest.raises(DataError, match=f"and green.*{told}"):
        model.encode(prompts, CASE.sampling)


def test_a_length_that_cuts_images_is_an_error_that_names_the_key(model: DiffusionModel) -> None:
    assert isinstance(model, QwenImageEditModel)
    kept = model.settings
    model.settings = replace(kept, max_sequence_length=2)
    try:
        with pytest.raises(ModelError, match=r"model.max_sequence_length=2 cuts the 1 images"):
            model.encode([edit(WIDE)], CASE.sampling)
    finally:
        model.settings = kept


@pytest.mark.parametrize("seen_by", ["prompt_embeds", "images"])
def test_the_network_sees_the_image_in_both_ways(model: DiffusionModel, seen_by: str) -> None:
    one, other = (model.encode([edit(image)], CASE.sampling) for image in (WIDE, OTHER_WIDE))
    assert isinstance(one, QwenEditConditioning)
    mixed = replace(one, **{seen_by: getattr(other, seen_by)})
    latents = torch.ones(1, *model.latent_shape(CASE.sampling))
    answers = [model.velocity(latents, torch.tensor([0.5]), told) for told in (one, mixed)]
    assert (answers[0] - answers[1]).abs().max() > 1e-4


def test_guidance_leads_away_from_the_text_alone(model: DiffusionModel) -> None:
    guided = replace(CASE.sampling, guidance_scale=4.0)
    told, away = model.encode([edit(WIDE)], guided), model.encode_negative([edit(WIDE)], guided)
    assert isinstance(told, QwenEditConditioning)
    assert isinstance(away, QwenEditConditioning)
    assert torch.equal(told.images, away.images)
    assert away.mask.sum() < told.mask.sum()


def test_plans_count_as_many_tokens_as_the_image_processor(model: DiffusionModel) -> None:
    assert isinstance(model, QwenImageEditModel)
    real, planned = model.pipeline.processor, QwenImageEditModel.parts.blank["processor"]()
    for height, width in [(384, 384), (480, 320), (256, 576)]:
        expected = real.get_number_of_image_patches(height, width)
        assert planned.get_number_of_image_patches(height, width) == expected
