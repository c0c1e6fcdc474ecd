"""Prompts that were encoded before: the same run, without text encoders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from families.sd3 import build_tiny_sd3
from runs import Run, command

from unirl.models.pipeline_model import PipelineModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    build_tiny_sd3(made / "sd3", with_t5=False)
    (made / "prompts.txt").write_text("a red cat\na blue dog\na green house\n")
    return made


def run(folder: Path, name: str, *words: str) -> Run:
    return command(
        "train",
        folder / name,
        "diffusion/sd3/sd3_trainside",
        f"model.path={folder / 'sd3'}",
        f"data.train={folder / 'prompts.txt'}",
        *("device=cpu", "num_rollouts=2", "batch_size=2", "sampling.samples_per_prompt=2"),
        *("sampling.height=32", "sampling.width=32", "num_threads=1", "doctor=false"),
        *("eval_interval=2", "eval_num_prompts=3", "save_interval=2", "model.precision=fp32"),
        *("model.frozen_dtype=fp32", "sampling.guidance_scale=3"),
        *words,
    )


def without_encoders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the models of the runs that follow have loaded beside the network."""
    seen: list[str] = []
    make = PipelineModel.__init__

    def watched(self: PipelineModel, *args: object) -> None:
        make(self, *args)  # type: ignore[arg-type]
        seen.extend(self.frozen_modules)

    monkeypatch.setattr(PipelineModel, "__init__", watched)
    return seen


def test_the_run_is_the_same_and_loads_no_text_encoder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(folder, "plain")
    stored = run(folder, "stored", f"model.encodings={folder / 'encodings'}")
    assert (plain.exit_code, stored.exit_code) == (0, 0), stored.errors
    # Alone or in a batch, an encoder's product may round differently.
    for ours, theirs in zip(stored.rows("rollout"), plain.rows("rollout"), strict=True):
        for name in ("rollout/reward_mean", "train/loss", "train/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
    assert "encodings into" in stored.log
    seen = without_encoders(monkeypatch)
    again = run(folder, "again", f"model.encodings={folder / 'encodings'}")
    assert again.numbers() == stored.numbers()
    assert seen == ["vae"], "nothing is encoded a second time"


def test_other_encoders_and_sizes_that_do_not_matter_are_told_apart(folder: Path) -> None:
    encodings = f"model.encodings={folder / 'second'}"
    assert run(folder, "first", encodings).exit_code == 0
    before = files(folder / "second")
    assert run(folder, "steps", encodings, "sampling.num_inference_steps=7").exit_code == 0
    assert files(folder / "second") == before, "the number of steps is nothing to an encoder"
    assert run(folder, "shorter", encodings, "model.max_sequence_length=9").exit_code == 0
    assert len(files(folder / "second")) == 2 * len(before)
    index = folder / "sd3" / "model_index.json"
    saved = index.read_text()
    index.write_text(json.dumps(json.loads(saved) | {"_diffusers_version": "0.0"}))
    try:
        assert run(folder, "other", encodings).exit_code == 0
    finally:
        index.write_text(saved)
    assert len(files(folder / "second")) == 3 * len(before), "it may say how to encode"


def test_a_damaged_encoding_is_named(folder: Path) -> None:
    encodings = f"model.encodings={folder / 'third'}"
    assert run(folder, "whole", encodings).exit_code == 0
    for file in files(folder / "third"):
        file.write_bytes(b"damaged")
    broken = run(folder, "broken", encodings)
    assert broken.exit_code == 1
    assert "Remove the file" in " ".join(broken.errors.split())


def test_a_plan_of_it_has_no_text_encoders(folder: Path) -> None:
    words = (f"model.path={folder / 'sd3'}", "sampling.height=32", "sampling.width=32")
    plain = command("plan", folder / "p", "diffusion/sd3/sd3_trainside", *words)
    stored = command(
        "plan", folder / "p", "diffusion/sd3/sd3_trainside", *words, "model.encodings=here"
    )
    assert (plain.exit_code, stored.exit_code) == (0, 0), stored.errors
    assert "text_encoder" in plain.output
    assert "text_encoder" not in stored.output


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*.safetensors"))
