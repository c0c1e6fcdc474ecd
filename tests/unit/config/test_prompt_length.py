"""Tokens of a prompt that the model's files do not allow are told before anything loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unirl.config.checks import problems
from unirl.config.schema import RunConfig

KEY = "model.max_sequence_length"


def found(length: int, path: Path, release: str | None = None) -> str:
    model = {"path": str(path), "release": release, "max_sequence_length": length}
    config = RunConfig.model_validate({"model": {"family": "ltx2", **model}})
    return " ".join(p.message for p in problems(config) if p.key == KEY)


@pytest.mark.parametrize(("length", "told"), [(200, "128 or 256"), (60, "to 128"), (256, "")])
def test_a_length_that_learned_tokens_do_not_fill_is_refused(
    tmp_path: Path, length: int, told: str
) -> None:
    file = tmp_path / "connectors" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"video_connector_num_learnable_registers": 128}))
    message = found(length, tmp_path)
    assert told in message
    assert bool(message) == bool(told)
    assert found(length, tmp_path / "nowhere", release="ltx-2") == message


@pytest.mark.parametrize(("family", "is_told"), [("sdxl", True), ("tiny", True), ("sd3", False)])
def test_a_length_that_the_family_does_not_read_is_told(family: str, is_told: bool) -> None:
    model = {"family": family, "path": ".", "max_sequence_length": 77}
    told = problems(RunConfig.model_validate({"model": model}))
    assert (KEY in {p.key for p in told}) == is_told
    del model["max_sequence_length"]
    assert KEY not in {p.key for p in problems(RunConfig.model_validate({"model": model}))}


def test_a_folder_that_says_nothing_passes(tmp_path: Path) -> None:
    assert not found(200, tmp_path)
