"""Where a run begins: the named checkpoint, its own newest one, or the beginning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import run_config

from unirl.checkpoint.identity import differences, identity
from unirl.checkpoint.source import find_source
from unirl.checkpoint.store import CheckpointStore
from unirl.core.errors import CheckpointError
from unirl.core.fingerprint import path_digest


def saved(directory: Path, step: int, run_name: str = "run") -> Path:
    def write(folder: Path) -> None:
        text = json.dumps({"config": {"run_name": run_name}})
        (folder / "trainer_state.json").write_text(text)

    return CheckpointStore(directory).save(step, write)


def test_auto_looks_into_the_runs_own_folder(tmp_path):
    config = run_config({"output_dir": str(tmp_path), "load_dir": "auto"})
    assert find_source(config).folder is None
    checkpoint = saved(tmp_path / "run" / "checkpoints", 4)
    assert find_source(config).folder == checkpoint
    assert find_source(config.model_copy(update={"load_dir": None})).folder is None


def test_auto_refuses_checkpoints_of_another_run_in_save_dir(tmp_path):
    config = run_config({"save_dir": str(tmp_path), "load_dir": "auto"})
    saved(tmp_path, 4, run_name="other")
    with pytest.raises(CheckpointError, match=r"saved by the run 'other'(.|\n)*save_dir"):
        find_source(config)
    checkpoint = saved(tmp_path, 6)
    assert find_source(config).folder == checkpoint


def test_a_file_that_changed_is_told_and_a_copy_is_not(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\n")
    before = identity(run_config({"data.train": str(prompts)}))
    copy = tmp_path / "copy.txt"
    copy.write_text("a\nb\n")
    assert differences(before, identity(run_config({"data.train": str(copy)}))) == []
    prompts.write_text("a\nc\n")
    changed = differences(before, identity(run_config({"data.train": str(prompts)})))
    assert [line.split(":")[0] for line in changed] == ["content of data.train"]
    assert differences({"torch version": "1"}, before)[0].startswith("torch version: 1 -> ")


def test_the_digest_of_a_folder_is_that_of_its_files_but_hidden_ones(tmp_path):
    model = tmp_path / "model"
    (model / "unet").mkdir(parents=True)
    (model / "unet" / "weights.bin").write_bytes(b"1" * 100)
    before = path_digest(model)
    (model / ".cache").mkdir()
    (model / ".cache" / "lock").write_text("x")
    assert path_digest(model) == before
    (model / "unet" / "weights.bin").write_bytes(b"1" * 99 + b"2")
    assert path_digest(model) != before
    assert path_digest(tmp_path / "nowhere") == ""
