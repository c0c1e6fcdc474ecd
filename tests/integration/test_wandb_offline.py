"""A run reports to Weights & Biases when a key says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import wandb
from runs import train


def test_a_run_and_its_resume_are_one_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = ("logging.report_to_wandb=true", "save_interval=1", "eval_interval=2")
    run = train(tmp_path / "run", "num_rollouts=1", *settings)
    assert run.exit_code == 0, run.errors
    saved = json.loads((run.checkpoint(1) / "trainer_state.json").read_text())
    resumed = train(run.directory, *settings, f"load_dir={run.directory}")
    assert resumed.exit_code == 0, resumed.errors
    records = list(run.directory.glob("wandb/offline-run-*/run-*.wandb"))
    assert {path.name for path in records} == {f"run-{saved['wandb_run_id']}.wandb"}
    assert sum(path.stat().st_size for path in records) > 1000
    assert [row["rollout"] for row in resumed.rows("rollout")] == [0, 1]


def test_wandb_that_fails_later_costs_a_warning_and_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")

    def refuse(self: object, *args: object, **settings: object) -> None:
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(wandb.Run, "log", refuse)
    run = train(tmp_path / "run", "logging.report_to_wandb=true", "eval_interval=2")
    assert run.exit_code == 0, run.errors
    assert run.log.count("wandb failed and is left out from now on") == 1
    assert len(run.rows()) == 4


def test_wandb_that_cannot_start_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**settings: object) -> None:
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    run = train(tmp_path / "run", "logging.report_to_wandb=true")
    assert run.exit_code == 1
    assert "logging.report_to_wandb" in run.errors
    assert "WANDB_MODE=offline" in run.errors
    assert train(tmp_path / "run").exit_code == 0
