"""A whole run on a pipeline that unirl has no family for."""

from __future__ import annotations

from pathlib import Path

from runs import command
from tiny_chroma import build_tiny_chroma

from unirl.cli.main import main


def test_a_run_trains_saves_resumes_and_exports(tmp_path: Path) -> None:
    folder = build_tiny_chroma(tmp_path / "chroma")
    (tmp_path / "prompts.txt").write_text("a red cat\na blue dog\n")
    words = (
        *("model.family=generic", f"model.path={folder}", "model.precision=fp32"),
        *("stack.lora.target_modules=[to_q,to_v]", f"data.train={tmp_path / 'prompts.txt'}"),
        *("device=cpu", "batch_size=2", "sampling.samples_per_prompt=2", "num_threads=1"),
        *("sampling.height=32", "sampling.width=64", "sampling.num_inference_steps=6"),
        *("num_rollouts=2", "eval_interval=2", "eval_num_prompts=2", "save_interval=1"),
    )
    run = command("train", tmp_path / "run", "diffusion/sd3/sd3_trainside", *words)
    assert run.exit_code == 0, run.errors
    (before, after) = (run.weights(step) for step in (1, 2))
    assert any((before[name] != after[name]).any() for name in before)
    words = (*words, f"load_dir={run.checkpoint(1)}")
    again = command("train", tmp_path / "again", "diffusion/sd3/sd3_trainside", *words)
    resumed = again.weights(2)
    assert all((after[name] == resumed[name]).all() for name in after)
    assert main(["export", str(run.directory), str(tmp_path / "lora")]) == 0


def test_a_replica_cannot_have_it(tmp_path: Path) -> None:
    folder = build_tiny_chroma(tmp_path / "chroma")
    (tmp_path / "prompts.txt").write_text("a red cat\na blue dog\n")
    run = command(
        "train",
        tmp_path / "run",
        "diffusion/sd3/sd3_replica_lora",
        *("model.family=generic", f"model.path={folder}", "device=cpu", "batch_size=2"),
        *("stack.lora.target_modules=[to_q]", f"data.train={tmp_path / 'prompts.txt'}"),
        *("eval_num_prompts=2", "sampling.height=32", "sampling.width=64"),
    )
    assert run.exit_code != 0
    assert "rollout.engine=trainside" in " ".join(run.errors.split())
