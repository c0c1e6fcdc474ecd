"""What the proofs of all families do not say about Wan from an image."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import prompts
from families.wan_i2v import CASES

from unirl.core.errors import DataError, ModelError

CASE = CASES[0]
SAMPLING = replace(CASE.sampling, guidance_scale=4.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASE.build(tmp_path_factory.mktemp("models") / "wan_i2v")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return CASE.load(folder)


def test_what_guidance_leads_away_from_keeps_the_image(model: Any) -> None:
    told, negative = (
        model.encode(CASE.prompts, SAMPLING),
        model.encode_negative(CASE.prompts, SAMPLING),
    )
    assert torch.equal(told.first_frame, negative.first_frame)
    assert torch.equal(told.image_embeds, negative.image_embeds)
    assert torch.equal(negative.prompt_embeds[0], negative.prompt_embeds[1])
    assert not torch.equal(told.prompt_embeds, negative.prompt_embeds)


def test_only_the_first_frame_is_given(model: Any) -> None:
    mask = model.encode(CASE.prompts, SAMPLING).first_frame[:, :4]
    assert mask[:, :, 0].all()
    assert not mask[:, :, 1:].any()


def test_the_image_changes_the_answer(model: Any) -> None:
    first, second = (model.encode([prompt], SAMPLING) for prompt in CASE.prompts)
    other = replace(first, first_frame=second.first_frame)
    unseen = replace(first, image_embeds=second.image_embeds)
    latents = torch.zeros(1, *model.latent_shape(SAMPLING))
    answers = [model.velocity(latents, torch.ones(1), c) for c in (first, other, unseen)]
    assert not torch.allclose(answers[0], answers[1])
    assert not torch.allclose(answers[0], answers[2])


def test_a_prompt_without_its_image_is_named(model: Any) -> None:
    with pytest.raises(DataError, match="'lonely' comes with 0 images"):
        model.encode(prompts("lonely"), SAMPLING)


def test_texts_of_another_length_are_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.max_sequence_length=24.*Set .*=512"):
        replace(CASE, max_sequence_length=24).load(folder)


def test_a_network_for_two_frames_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "flf2v"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "transformer/config.json").read_text())
    config["pos_embed_seq_len"] = 514
    (copy / "transformer/config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="first and a last frame"):
        CASE.model_class.blueprint(copy, CASE.settings())
