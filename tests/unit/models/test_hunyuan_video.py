"""What the proofs of all families do not say about HunyuanVideo and HunyuanVideo 1.5."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import prompts
from families.case import FamilyCase
from families.hunyuan_video import CASES as FIRST_CASES
from families.hunyuan_video15 import CASES as SECOND_CASES

from unirl.core.errors import ModelError

FIRST, SECOND = FIRST_CASES[0], SECOND_CASES[0]


@pytest.fixture(scope="module", params=[FIRST, SECOND], ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> FamilyCase:
    return request.param


@pytest.fixture(scope="module")
def folder(case: FamilyCase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case.build(tmp_path_factory.mktemp("models") / case.name)


@pytest.fixture(scope="module")
def model(case: FamilyCase, folder: Path) -> Any:
    return case.load(folder)


def test_the_frames_that_were_asked_for_are_those_of_the_whole_video(
    case: FamilyCase, model: Any
) -> None:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, *model.latent_shape(case.sampling), generator=generator)
    every = model.decode(latents, case.sampling)
    assert every.shape == (2, 5, 3, case.sampling.height, case.sampling.width)
    for wanted, chosen in (("first", every[:, :1]), (2, every[:, ::2])):
        assert torch.equal(
            model.decode(latents, replace(case.sampling, decoded_frames=wanted)), chosen
        )


def test_latents_of_videos_are_those_the_encoder_gives(case: FamilyCase, model: Any) -> None:
    height, width = case.sampling.height, case.sampling.width
    video = torch.randint(0, 256, (2, 5, 3, height, width), dtype=torch.uint8)
    latents = model.latents_of(video)
    assert latents.shape == (2, *model.latent_shape(case.sampling))
    vae = model.pipeline.vae
    own = vae.encode((video.transpose(1, 2) / 127.5 - 1)[:1]).latent_dist.mode()
    torch.testing.assert_close(latents[:1], own * vae.config["scaling_factor"], rtol=0, atol=1e-4)


def test_frames_and_sizes_that_do_not_fit_are_named(case: FamilyCase, model: Any) -> None:
    with pytest.raises(ModelError, match=r"sampling\.num_frames=6"):
        model.latent_shape(replace(case.sampling, num_frames=6))
    with pytest.raises(ModelError, match=r"sampling\.height=40.*multiples of 16"):
        model.latent_shape(replace(case.sampling, height=40))


def changed(folder: Path, copy: Path, file: str, **values: Any) -> Path:
    shutil.copytree(folder, copy)
    config = json.loads((copy / file).read_text())
    (copy / file).write_text(json.dumps({**config, **values}))
    return copy


def test_guidance_of_a_network_that_was_not_distilled_is_refused(tmp_path: Path) -> None:
    folder = FIRST.build(tmp_path / "whole")
    copy = changed(folder, tmp_path / "plain", "transformer/config.json", guidance_embeds=False)
    model = FIRST.model_class.blueprint(copy, FIRST.settings())
    assert model.latent_shape(replace(FIRST.sampling, guidance_scale=1.0))
    with pytest.raises(ModelError, match=r"sampling\.guidance_scale=6"):
        model.latent_shape(replace(FIRST.sampling, guidance_scale=6.0))


def test_another_kind_of_guidance_in_the_folder_is_refused(tmp_path: Path) -> None:
    folder = SECOND.build(tmp_path / "whole")
    copy = changed(folder, tmp_path / "other", "guider/guider_config.json", guidance_rescale=0.5)
    with pytest.raises(ModelError, match=r"its guider is .*guidance_rescale.*0\.5"):
        SECOND.load(copy)


def test_only_quoted_texts_are_read_as_glyphs(tmp_path: Path) -> None:
    model = SECOND.load(SECOND.build(tmp_path / "whole"))
    plain, quoted = prompts("a sign", 'a sign that says "9"')
    told = model.encode([plain, quoted], SECOND.sampling)
    assert not told.glyph_mask[0].any()
    assert told.glyph_mask[1].any()
