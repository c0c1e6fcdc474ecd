"""What FLUX.2 refuses, and the way back from images; the proofs are in test_family_proofs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families.case import FamilyCase
from families.flux2 import CASES

from unirl.core.errors import ModelError
from unirl.models.base import DiffusionModel

DEV, BASE, DISTILLED = CASES


def model_of(case: FamilyCase, folder: Path, *, encoders: bool = False) -> DiffusionModel:
    return case.load(case.build(folder), encoders=encoders)


def test_a_distilled_klein_takes_no_guidance(tmp_path: Path) -> None:
    model = model_of(DISTILLED, tmp_path)
    guided = replace(DISTILLED.sampling, guidance_scale=4.0)
    with pytest.raises(ModelError, match=r"sampling.guidance_scale=4.*flux2_klein"):
        model.latent_shape(guided)


def test_a_klein_that_is_not_distilled_is_guided_by_the_empty_text(tmp_path: Path) -> None:
    model = model_of(BASE, tmp_path, encoders=True)
    guided = replace(BASE.sampling, guidance_scale=4.0)
    assert model.encode_negative(BASE.prompts, BASE.sampling) is None
    negative = model.encode_negative(BASE.prompts, guided)
    empty = replace(BASE.prompts[0], text="")
    expected = model.encode([empty, empty], guided)
    assert torch.equal(vars(negative)["prompt_embeds"], vars(expected)["prompt_embeds"])


def test_a_size_of_half_a_token_is_refused(tmp_path: Path) -> None:
    model = model_of(DEV, tmp_path)
    with pytest.raises(ModelError, match=r"sampling.width=40.*multiples of 16"):
        model.latent_shape(replace(DEV.sampling, width=40))


def test_latents_of_images_are_the_pipelines(tmp_path: Path) -> None:
    folder = DEV.build(tmp_path)
    model, pipeline = DEV.load(folder), DEV.pipeline(folder)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, 3, 32, 64), dtype=torch.uint8, generator=generator)
    expected = pipeline._encode_vae_image(images / 127.5 - 1, generator=None)
    torch.testing.assert_close(model.latents_of(images), expected, rtol=0, atol=1e-5)
    assert expected.shape[1:] == model.latent_shape(DEV.sampling)
