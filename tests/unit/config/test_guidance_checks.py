"""Guidance: a scale that the model would not take is an error before anything loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unirl.config.checks import problems
from unirl.config.schema import RunConfig

WAN = {"family": "wan", "path": "."}
SCHNELL = ("flux", "transformer/config.json", {"guidance_embeds": False})
DISTILLED_KLEIN = ("flux2_klein", "model_index.json", {"is_distilled": True})


def found(model: dict[str, Any], **blocks: dict[str, Any]) -> dict[str, str]:
    sampling = {"height": 32, "width": 32, **blocks.pop("sampling", {})}
    config = RunConfig.model_validate({"model": model, "sampling": sampling, **blocks})
    return {p.key: p.message for p in problems(config) if p.key.endswith("guidance_scale")}


def folder_of(tmp_path: Path, family: str, file: str, says: dict[str, Any]) -> dict[str, Any]:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(says))
    return {"family": family, "path": str(tmp_path)}


@pytest.mark.parametrize("block", ["sampling", "eval_sampling"])
@pytest.mark.parametrize("model", [SCHNELL, DISTILLED_KLEIN])
def test_guidance_of_a_model_whose_files_say_it_takes_none_is_refused(
    tmp_path: Path, model: tuple[str, str, dict[str, Any]], block: str
) -> None:
    (message,) = found(folder_of(tmp_path, *model), **{block: {"guidance_scale": 3.5}}).values()
    assert next(iter(model[2])) in message
    assert f"Set {block}.guidance_scale=1." in message


def test_guidance_of_a_family_that_takes_none_is_refused() -> None:
    model = {"family": "minimax_h3", "path": "."}
    told = found(model, sampling={"guidance_scale": 4.0})
    assert "model.family=minimax_h3" in told["sampling.guidance_scale"]
    assert not found(model)


@pytest.mark.parametrize(
    "model", [("flux", SCHNELL[1], {"guidance_embeds": True}), ("flux", SCHNELL[1], {}), SCHNELL]
)
def test_guidance_that_is_taken_unknown_or_off_passes(
    tmp_path: Path, model: tuple[str, str, dict[str, Any]]
) -> None:
    scale = 1.0 if model is SCHNELL else 3.5
    assert not found(folder_of(tmp_path, *model), sampling={"guidance_scale": scale})


def test_without_a_folder_the_release_speaks_for_the_model() -> None:
    klein = {"family": "flux2_klein", "path": "nowhere", "release": "flux.2-klein-4b"}
    (message,) = found(klein, sampling={"guidance_scale": 4.0}).values()
    assert "is_distilled=true in its model_index.json" in message


def test_low_noise_guidance_needs_guidance_and_a_second_expert() -> None:
    low = {"low_noise_guidance_scale": 3.0}
    assert not found(WAN, sampling={**low, "guidance_scale": 4.0})
    (message,) = found(WAN, sampling={**low, "guidance_scale": 1.0}).values()
    assert "there is no guidance" in message
    # Training keeps its own when an evaluation goes without guidance.
    both = {"sampling": {**low, "guidance_scale": 4.0}, "eval_sampling": {"guidance_scale": 1.0}}
    assert not found(WAN, **both)
    for block in ("sampling", "eval_sampling"):
        (message,) = found({}, **{block: low}).values()
        assert "no network of its own" in message
