"""Frozen weights in 8 bits: a run trains on them, parks them, and its plan knows their size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families.sd3 import CASES, build_tiny_sd3
from runs import Run, command, compare_with_plan
from torch import nn

from unirl.memory.wrapped import plain_tensors
from unirl.models.base import LoadSettings
from unirl.models.sd3 import StableDiffusion3Model

(CASE,) = CASES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    build_tiny_sd3(made / "sd3", with_t5=False)
    (made / "prompts.txt").write_text("a red cat\na blue dog\n")
    return made


def words(folder: Path) -> tuple[str, ...]:
    return (
        f"model.path={folder / 'sd3'}",
        f"data.train={folder / 'prompts.txt'}",
        "model.quantization=int8",
        *("device=cpu", "num_rollouts=2", "batch_size=2", "sampling.samples_per_prompt=2"),
        *("sampling.height=32", "sampling.width=32", "num_threads=1", "doctor=false"),
        *("eval_interval=2", "eval_num_prompts=2", "save_interval=2"),
    )


def run(folder: Path, name: str, *more: str, recipe: str = "diffusion/sd3/sd3_trainside") -> Run:
    return command("train", folder / name, recipe, *words(folder), *more)


def settings(quantization: str | None) -> LoadSettings:
    made = CASE.settings(torch.bfloat16)
    return LoadSettings(**{**vars(made), "quantization": quantization})


def bytes_of(network: nn.Module) -> int:
    held = [*network.parameters(), *network.buffers()]
    plain = [part for tensor in held for part in plain_tensors(tensor)]
    return sum(tensor.nbytes for tensor in plain)


def test_rounded_weights_take_half_and_a_plan_counts_the_same(folder: Path) -> None:
    path = folder / "sd3"
    usual = StableDiffusion3Model.load(path, settings(None))
    rounded = StableDiffusion3Model.load(path, settings("int8"))
    drawn = StableDiffusion3Model.blueprint(path, settings("int8"))
    assert bytes_of(rounded.network) < 0.8 * bytes_of(usual.network)  # rows are short here
    assert bytes_of(drawn.network) == bytes_of(rounded.network)
    prompts, sampling = CASE.prompts, CASE.sampling
    latents = torch.randn(2, *usual.latent_shape(sampling), generator=torch.Generator())
    conditioning, sigma = usual.encode(prompts, sampling), torch.tensor([0.9, 0.3])
    with torch.no_grad():
        exact = usual.velocity(latents, sigma, conditioning)
        near = rounded.velocity(latents, sigma, conditioning)
    assert 0 < (near - exact).norm() / exact.norm() < 0.1


def test_a_run_learns_on_it_and_resumes_bit_for_bit(folder: Path) -> None:
    whole = run(folder, "whole")
    assert whole.exit_code == 0, whole.errors
    assert whole.rows("rollout")[-1]["train/grad_norm"] > 0
    first = run(folder, "first", "save_interval=1")
    resumed = run(folder, "resumed", f"load_dir={first.checkpoint(1)}")
    ours, theirs = resumed.weights(2), whole.weights(2)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_parked_weights_come_back_as_they_were_and_the_plan_equals_the_run(folder: Path) -> None:
    recipe, keys = "diffusion/sd3/sd3_replica_lora", ("rollout_resident=false",)
    parked = run(folder, "parked", *keys, "train_resident=false", recipe=recipe)
    assert parked.exit_code == 0, parked.errors
    resident = run(folder, "resident", *keys, "train_resident=true", recipe=recipe)
    ours, theirs = parked.weights(2), resident.weights(2)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    code, told = compare_with_plan(parked)
    assert code == 0, told


def test_an_adapter_is_exported_and_merged_into_exact_weights(folder: Path, tmp_path: Path) -> None:
    from unirl.runtime.export import export_checkpoint

    done = run(folder, "exported")
    assert export_checkpoint(done.directory, tmp_path / "a").kind == "adapter"
    merged = export_checkpoint(done.directory, tmp_path / "b", kind="model")
    assert merged.largest_difference < 0.05  # bf16


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("stack.lora=null", "model.quantization"),
        ("stack.lora.use_dora=true", "stack.lora.use_dora"),
        ("save_mode=full", "save_mode"),
        ("num_devices=2", "model.quantization"),
    ],
)
def test_what_does_not_go_with_it_is_said_first(folder: Path, key: str, named: str) -> None:
    refused: Any = run(folder, "refused", key)
    assert refused.exit_code == 3
    assert named in refused.errors
