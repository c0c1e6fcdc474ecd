"""A resumed run is the run that was never stopped: weights, optimizer and metrics, bit for bit."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from runs import (
    REPLICA,
    Run,
    assert_same_state,
    contents,
    read_json_lines,
    start,
    train,
    wait_until,
)

EVERY_TWO = ("eval_interval=2", "save_interval=2")
KINDS = {
    "trainside-lora": ("quickstart", ()),
    "trainside-full": ("quickstart", ("stack.lora=null", "stack.optimizer.learning_rate=1e-4")),
    "replica-parked": (
        REPLICA,
        ("train_resident=false", "rollout_resident=false", "reward_resident=false"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_equals_never_stopping(tmp_path: Path, kind: str) -> None:
    recipe, settings = KINDS[kind]
    overrides = (*EVERY_TWO, *settings)
    whole = train(tmp_path / "whole", "num_rollouts=4", *overrides, recipe=recipe)
    half = train(tmp_path / "half", "num_rollouts=2", *overrides, recipe=recipe)
    elsewhere = train(
        tmp_path / "elsewhere",
        "num_rollouts=4",
        f"load_dir={half.checkpoint(2)}",
        *overrides,
        recipe=recipe,
    )
    resumed = train(
        tmp_path / "half",
        "num_rollouts=4",
        f"load_dir={half.directory}",
        *overrides,
        recipe=recipe,
    )
    assert resumed.exit_code == elsewhere.exit_code == 0
    for other in (resumed, elsewhere):
        assert_same_state(whole, other, step=4)
    assert resumed.numbers() == whole.numbers()
    for cost in ("progress/wall_seconds", "progress/device_seconds"):
        seconds = [row[cost] for row in resumed.rows()]
        assert seconds == sorted(seconds), "time goes on after a resume"
    # Elsewhere the rows begin with the evaluation of the loaded weights.
    first = next(i for i, row in enumerate(whole.rows()) if row["rollout"] == 2)
    assert elsewhere.numbers() == whole.numbers()[first:]
    assert "resumed from" in resumed.log
    assert "another setting" not in resumed.log


def test_windows_with_several_updates_resume_exactly(tmp_path: Path) -> None:
    """One optimizer step a window, and a schedule that depends on the step count."""
    overrides = (
        "accumulate_rollouts=2",
        "save_interval=2",
        "num_rollouts=4",
        "stack.scheduler.type=cosine",
        "stack.scheduler.warmup_steps=1",
        "sampling.sde_steps.strategy=random",
        "sampling.sde_steps.num_steps=1",
    )
    whole = train(tmp_path / "whole", *overrides)
    resumed = train(tmp_path / "again", *overrides, f"load_dir={whole.checkpoint(2)}")
    assert_same_state(whole, resumed, step=4)
    assert whole.numbers()[-1] == resumed.numbers()[-1]


def test_a_checkpoint_of_the_whole_network_resumes_exactly(tmp_path: Path) -> None:
    overrides = ("save_mode=full", "save_interval=1")
    whole = train(tmp_path / "whole", *overrides)
    resumed = train(tmp_path / "again", *overrides, f"load_dir={whole.checkpoint(1)}")
    assert_same_state(whole, resumed, step=2)
    adapter = train(tmp_path / "adapter", "save_interval=1")
    assert whole.weights(2).keys() > adapter.weights(2).keys()
    crossed = train(tmp_path / "crossed", "save_interval=1", f"load_dir={whole.checkpoint(1)}")
    assert_same_state(adapter, crossed, step=2)


def test_a_killed_run_resumes_as_if_nothing_had_happened(tmp_path: Path) -> None:
    directory = tmp_path / "killed"
    process = start(directory, "num_rollouts=1000", *EVERY_TWO)
    wait_until((directory / "checkpoints" / "checkpoint-2").exists, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # What a kill in the middle of a write leaves behind.
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "rollout", "rollout": 2, "opt')
    half_written = directory / "checkpoints" / ".writing-checkpoint-4"
    half_written.mkdir(exist_ok=True)
    (half_written / "weights.safetensors").write_bytes(b"x")
    checkpoint = directory / "checkpoints" / "checkpoint-2"
    resumed = train(directory, "num_rollouts=4", *EVERY_TWO, f"load_dir={checkpoint}")
    assert resumed.exit_code == 0, resumed.errors
    whole = train(tmp_path / "whole", "num_rollouts=4", *EVERY_TWO)
    assert_same_state(whole, resumed, step=4)
    assert whole.numbers() == resumed.numbers()
    assert not half_written.exists()
    moved = (directory / "metrics.jsonl.before-resume-2").read_text()
    assert moved.endswith('"rollout": 2, "opt\n')


def test_a_changed_setting_is_named_when_resuming(tmp_path: Path) -> None:
    half = train(tmp_path / "half", "num_rollouts=1", "save_interval=1")
    resumed = train(
        tmp_path / "more", f"load_dir={half.directory}", "stack.optimizer.learning_rate=0.002"
    )
    assert "stack.optimizer.learning_rate: 0.001 -> 0.002" in resumed.log
    assert resumed.rows("rollout")[-1]["train/lr"] == 0.002


def test_optimizer_settings_of_the_resuming_run_take_effect(tmp_path: Path) -> None:
    half = train(tmp_path / "half", "num_rollouts=1", "save_interval=1")
    resumed = train(
        tmp_path / "more",
        f"load_dir={half.directory}",
        "save_interval=1",
        "stack.optimizer.weight_decay=0.5",
        "stack.optimizer.adam_beta2=0.9",
    )
    group = resumed.optimizer(2)["optimizer"]["param_groups"][0]
    assert group["weight_decay"] == 0.5
    assert tuple(group["betas"]) == (0.9, 0.9)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two rollouts, evaluated before and after, checkpoint-1 and checkpoint-2."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    return train(directory, "eval_interval=2", "save_interval=1")


def test_resuming_a_finished_run_is_refused_and_changes_nothing(
    finished: Run, tmp_path: Path
) -> None:
    copy = shutil.copytree(finished.directory, tmp_path / "copy")
    before = contents(copy)
    run = train(copy, "eval_interval=2", "save_interval=1", f"load_dir={copy}")
    assert run.exit_code == 3
    assert "num_rollouts=2" in run.errors
    after = contents(copy)
    assert {name: after[name] for name in before} == before


def test_asking_for_fewer_rollouts_than_are_done_is_refused(finished: Run, tmp_path: Path) -> None:
    run = train(tmp_path / "new", "num_rollouts=1", f"load_dir={finished.directory}")
    assert run.exit_code == 3
    assert "num_rollouts" in run.errors
    assert "2" in run.errors


def test_the_newest_checkpoint_is_the_present_branch_after_a_branch_died(
    finished: Run, tmp_path: Path
) -> None:
    """Resumed at rollout 1, a run that dies at once must not find the old checkpoint-2."""
    copy = shutil.copytree(finished.directory, tmp_path / "copy")
    died = train(
        copy,
        "num_rollouts=3",
        "save_interval=3",
        f"load_dir={copy}/checkpoints/checkpoint-1",
        "reward.scorers={ocr:null,color:null,broken:{path:'failing_scorers:Raises'}}",
    )
    assert died.exit_code == 1
    rows = read_json_lines(copy / "metrics.jsonl")
    assert [row["rollout"] for row in rows if row["kind"] == "rollout"] == [0]
    resumed = train(copy, "num_rollouts=3", "save_interval=3", f"load_dir={copy}")
    assert [row["rollout"] for row in resumed.rows("rollout")] == [0, 1, 2]
