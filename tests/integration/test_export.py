"""`unirl export`: what other programs and unirl itself read is what was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families.sd3 import build_tiny_sd3
from runs import Run, command, train
from safetensors import safe_open
from safetensors.torch import load_file

from unirl.cli.main import main
from unirl.config.resources import resolve_path
from unirl.models.tiny_dit import load_tiny_dit
from unirl.runtime.export import export_checkpoint


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("runs") / "tiny", "save_interval=1")


@pytest.fixture(scope="module")
def sd3_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("models")
    build_tiny_sd3(folder / "sd3", with_t5=False)
    prompts = folder / "prompts.txt"
    prompts.write_text("a red cat\na blue dog\n")
    return command(
        "train",
        folder / "run",
        "diffusion/sd3/sd3_trainside",
        f"model.path={folder / 'sd3'}",
        f"data.train={prompts}",
        *("device=cpu", "num_rollouts=1", "batch_size=2", "sampling.samples_per_prompt=2"),
        *("sampling.height=32", "sampling.width=32", "stack.lora.rank=4", "stack.lora.alpha=16"),
        *("eval_interval=0", "save_interval=1", "num_threads=1", "doctor=false"),
    )


def test_a_merged_model_is_what_was_trained_and_a_run_can_start_from_it(
    tiny_run: Run, tmp_path: Path
) -> None:
    done = export_checkpoint(tiny_run.directory, tmp_path / "out", kind="model")
    assert done.checkpoint.name == "checkpoint-2"
    assert done.largest_difference < 1e-5
    before, _ = load_tiny_dit(resolve_path("pkg:tiny/model.safetensors"))
    after, tokenizer = load_tiny_dit(done.path)
    assert tokenizer.vocabulary
    changed = [
        name
        for name, weight in after.named_parameters()
        if not torch.equal(weight, before.get_parameter(name))
    ]
    assert changed
    assert all(name.split(".")[-2] in ("qkv", "proj", "fc1", "fc2") for name in changed)
    again = train(tmp_path / "again", f"model.path={done.path}", "num_rollouts=1")
    assert again.exit_code == 0


def test_an_adapter_file_says_its_own_scale_and_is_read_back(sd3_run: Run, tmp_path: Path) -> None:
    assert sd3_run.exit_code == 0, sd3_run.errors
    assert main(["export", str(sd3_run.directory), str(tmp_path / "lora")]) == 0
    file = tmp_path / "lora" / "pytorch_lora_weights.safetensors"
    exported, trained = load_file(file), sd3_run.weights(1)
    assert len(exported) == len(trained) > 0
    for name, tensor in exported.items():
        held = trained[name.removeprefix("transformer.").replace(".weight", ".default.weight")]
        scale = 16 / 4 if ".lora_B." in name else 1.0
        assert torch.equal(tensor, held * scale), name
    with safe_open(file, framework="pt") as opened:
        (metadata,) = [json.loads(text) for text in opened.metadata().values() if "{" in text]
    assert metadata["transformer.lora_alpha"] == metadata["transformer.r"] == 4


def test_a_whole_pipeline_folder_keeps_all_else_and_loads_in_diffusers(
    sd3_run: Run, tmp_path: Path
) -> None:
    from diffusers import StableDiffusion3Pipeline

    out = tmp_path / "merged"
    assert main(["export", str(sd3_run.directory), str(out), "--as", "model"]) == 0
    pipeline = StableDiffusion3Pipeline.from_pretrained(out, text_encoder_3=None, tokenizer_3=None)
    assert not any("lora" in name for name, _ in pipeline.transformer.named_parameters())
    (index,) = (json.loads((out / "model_index.json").read_text()),)
    assert index["_class_name"] == "StableDiffusion3Pipeline"


def test_full_weights_have_no_adapter_to_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "full", "stack.lora=null", "save_interval=2")
    assert main(["export", str(run.directory), str(tmp_path / "a"), "--as", "adapter"]) == 1
    assert "--as model" in " ".join(capsys.readouterr().err.split())
    done = export_checkpoint(run.directory, tmp_path / "b")
    assert (done.kind, done.largest_difference) == ("model", 0.0)


def test_a_shadow_is_exported_by_its_name(tmp_path: Path) -> None:
    keys = ("algorithm.old_decay_start=0", "algorithm.old_decay_rate=0.3", "save_interval=2")
    settings = ("sampling.eta=0", "sampling.init_same_noise=false")
    run = train(tmp_path / "nft", *settings, *keys, recipe="diffusion/tiny/tiny_diffusion_nft")
    assert run.exit_code == 0, run.errors
    trained = export_checkpoint(run.directory, tmp_path / "trained", kind="model")
    old = export_checkpoint(run.directory, tmp_path / "old", kind="model", shadow="old")
    none = export_checkpoint(run.directory, tmp_path / "none", kind="model", shadow="none")
    weights, shadow, same = (load_file(made.path) for made in (trained, old, none))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert any(not torch.equal(weights[name], shadow[name]) for name in weights)
    from unirl.core.errors import CheckpointError

    with pytest.raises(CheckpointError, match="'older': it has only old"):
        export_checkpoint(run.directory, tmp_path / "older", shadow="older")


def test_nothing_is_overwritten(tiny_run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    assert main(["export", str(tiny_run.directory), str(tmp_path)]) == 1
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_model_that_moved_is_found_where_it_is_now(tiny_run: Run, tmp_path: Path) -> None:
    moved = tmp_path / "moved.safetensors"
    moved.write_bytes(resolve_path("pkg:tiny/model.safetensors").read_bytes())
    done = export_checkpoint(
        tiny_run.directory, tmp_path / "out", kind="model", model_path=str(moved)
    )
    assert done.largest_difference < 1e-5


def test_shards_are_exported_like_whole_weights(tmp_path: Path) -> None:
    keys = ("save_interval=2", "seed=3")
    whole = train(tmp_path / "whole", *keys)
    shards = train(tmp_path / "shards", *keys, "save_format=sharded")
    assert shards.exit_code == 0, shards.errors
    files = [
        load_file(export_checkpoint(run.directory, tmp_path / name, kind="model").path)
        for run, name in ((whole, "a"), (shards, "b"))
    ]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
