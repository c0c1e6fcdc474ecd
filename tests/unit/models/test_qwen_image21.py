"""What Qwen-Image 2.1 refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families.qwen_image21 import CASES

from unirl.core.errors import ModelError
from unirl.models.qwen_flow import QwenTexts
from unirl.planning.weightless import WeightlessMode, make_weightless

CASE = CASES[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CASE.patched.items():
            patch.setattr(name, value)
        yield CASE.build(tmp_path_factory.mktemp("qwen21") / "folder")


def test_a_text_without_tokens_is_an_error(folder: Path) -> None:
    model = CASE.load(folder, encoders=False)
    unknown = QwenTexts(torch.zeros(1, 4, 32), torch.zeros(1, 4, dtype=torch.bool))
    with pytest.raises(ModelError, match="without a token"):
        model.velocity(torch.zeros(1, 4, 4, 8), torch.ones(1), unknown)


def test_a_plan_has_texts_of_the_full_length(folder: Path) -> None:
    model = CASE.model_class.blueprint(folder, CASE.settings())
    for module in (model.network, *model.frozen_modules.values()):
        make_weightless(module)
    with WeightlessMode(), torch.no_grad():
        told = model.encode(CASE.prompts, CASE.sampling)
        assert isinstance(told, QwenTexts)
        assert told.mask.sum(dim=1).tolist() == [CASE.max_sequence_length] * 2
        latents = torch.zeros(2, *model.latent_shape(CASE.sampling))
        assert model.velocity(latents, torch.ones(2), told).shape == latents.shape


def test_levels_of_the_folder_fix_the_number_of_steps(folder: Path) -> None:
    index = folder / "model_index.json"
    published = json.loads(index.read_text())
    levels = [1.0, 0.9, 0.7, 0.5, 0.2]
    index.write_text(json.dumps({**published, "sample_sigmas": levels}))
    theirs = CASE.pipeline(folder)
    model = CASE.load(folder, encoders=False)
    index.write_text(json.dumps(published))
    assert theirs.config.sample_sigmas == levels
    first, *rest = model.sigmas(CASE.sampling)
    assert (first, rest[-1]) == (1.0, 0.0)
    assert rest[0] > rest[1] > rest[2] > rest[3] > 0.2
    with pytest.raises(ModelError, match=r"num_inference_steps=4.*5 noise levels"):
        model.sigmas(replace(CASE.sampling, num_inference_steps=4))
