"""wandb gets every row on its own axis; offline, end to end."""

import sys

import numpy as np
import pytest

from unirl.core.errors import UnirlError
from unirl.tracking.media import save_grid
from unirl.tracking.tracker import Panel, Picture, Row
from unirl.tracking.wandb_sink import WandbSink


def make_sink(directory, run_id=None) -> WandbSink:
    return WandbSink(
        project="unirl-test",
        entity=None,
        run_name="run",
        tags=["a", "b"],
        directory=directory,
        config={"seed": 3, "stack": {"micro_batch_size": 8}},
        run_id=run_id,
    )


def test_an_offline_run_is_written_and_continued_under_its_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sink = make_sink(tmp_path)
    sink.log(Row("eval", 0, 0, {"eval/reward_mean": 0.4}))
    sink.log(Row("rollout", 0, 2, {"rollout/reward_mean": 0.5, "train/loss": 0.1}))
    grid = tmp_path / "grid.png"
    save_grid(np.zeros((1, 4, 4, 3), dtype=np.uint8), ["black"], grid, 1, 1)
    sink.show(Panel("eval/samples", 0, (Picture(grid, "black", 0.25),)))
    run_id = sink.run_id
    sink.close()

    resumed = make_sink(tmp_path, run_id)
    assert resumed.run_id == run_id
    resumed.log(Row("rollout", 1, 4, {"rollout/reward_mean": 0.6}))
    resumed.close()

    logs = list((tmp_path / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert logs
    content = b"".join(log.read_bytes() for log in logs)
    for name in (
        b"rollout/reward_mean",
        b"train/step",
        b"eval/step",
        b"micro_batch_size",
        b"0.250 black",
    ):
        assert name in content
    assert list((tmp_path / "wandb").glob("offline-run-*/files/media/images/eval/*.png"))


class FakeRun:
    id = "abc"

    def __init__(self):
        self.logged = []
        self.axes = {}

    def define_metric(self, name, step_metric=None, hidden=None):
        self.axes[name] = step_metric

    def log(self, values):
        self.logged.append(values)


def test_each_family_has_its_axis(tmp_path, monkeypatch):
    import wandb

    run = FakeRun()
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    sink = make_sink(tmp_path)
    sink.log(Row("rollout", 5, 12, {"train/loss": 0.1, "perf/train_seconds": 2.0}))
    sink.log(Row("eval", 6, 12, {"eval/reward_mean": 0.4}))
    assert run.logged == [
        {"train/loss": 0.1, "perf/train_seconds": 2.0, "rollout/step": 6, "train/step": 12},
        {"eval/reward_mean": 0.4, "eval/step": 6},
    ]
    assert {name: axis for name, axis in run.axes.items() if axis} == {
        "train/*": "train/step",
        "rollout/*": "rollout/step",
        "perf/*": "rollout/step",
        "memory/*": "rollout/step",
        "residency/*": "rollout/step",
        "eval/*": "eval/step",
    }


def test_a_failing_start_names_the_key(tmp_path, monkeypatch):
    import wandb

    def refuse(**_):
        raise wandb.Error("No API key configured")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UnirlError, match=r"(?s)report_to_wandb=true.*No API key.*WANDB_MODE"):
        make_sink(tmp_path)


def test_a_missing_package_names_the_key(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UnirlError, match=r"report_to_wandb=true"):
        make_sink(tmp_path)
