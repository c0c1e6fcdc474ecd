"""A run reports to TensorBoard and trackio when keys say so, and a resume goes on there."""

from __future__ import annotations

import os
import re

import pytest
from runs import Run, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from unirl.tracking.metrics import describe, describe_panel
from unirl.tracking.trackio_sink import trackio_name

TRACKED = (
    "logging.report_to_tensorboard=true",
    "logging.report_to_trackio=true",
    "save_interval=1",
    "eval_interval=1",
    "logging.media_max_items=2",
)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two rollouts, and from the first one's checkpoint on once more, up to three."""
    folder = tmp_path_factory.mktemp("tracked")
    # trackio reads it when it is imported, which nothing else in these tests does.
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    first = train(folder / "run", "num_rollouts=2", *TRACKED)
    assert first.exit_code == 0, first.errors
    checkpoint = f"load_dir={first.checkpoint(1)}"
    run = train(folder / "run", "num_rollouts=3", checkpoint, *TRACKED)
    assert run.exit_code == 0, run.errors
    assert "failed and is left out" not in first.log + run.log
    return run


def test_tensorboard_has_every_number_of_the_record_once(resumed: Run) -> None:
    reader = EventAccumulator(
        str(resumed.directory / "tensorboard"), size_guidance={"scalars": 0, "images": 0}
    ).Reload()
    tags = reader.Tags()
    for row in resumed.rows():
        done = row["rollout"] + (row["kind"] == "rollout")
        for name, value in row.items():
            if "/" not in name or (row["kind"] == "eval" and name.startswith("progress/")):
                continue
            step = row["optimizer_step"] if name.startswith("train/") else done
            points = [event.value for event in reader.Scalars(name) if event.step == step]
            assert points == [pytest.approx(value, rel=1e-6)], name
    assert all(describe(tag) for tag in tags["scalars"])
    shown = {tag for tag in tags["images"] if tag.startswith("eval/samples/")}
    assert shown == {"eval/samples/0000", "eval/samples/0001"}
    assert {"eval/grid", "eval/before_after"} == set(tags["images"]) - shown
    for tag in shown:
        assert [event.step for event in reader.Images(tag)] == [0, 1, 2, 3]


def test_trackio_has_one_run_with_every_number_of_the_record(resumed: Run) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("unirl") == [trackio_name("run", resumed.directory)]
    logs = SQLiteStorage.get_logs("unirl", trackio_name("run", resumed.directory))
    for row in resumed.rows("rollout"):
        metrics = {name: value for name, value in row.items() if "/" in name}
        assert any(metrics.items() <= log.items() for log in logs)
    for log in logs:
        for name, value in log.items():
            if isinstance(value, dict):
                assert describe_panel(re.sub(r"/\d{4}$", "", name))
            elif name not in ("step", "timestamp"):
                assert describe(name)
