"""TensorBoard gets every point once, whatever a resume took back; read with its own reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from unirl.core.errors import UnirlError
from unirl.tracking.tensorboard_sink import TensorBoardSink
from unirl.tracking.tracker import Panel, Picture, Row


def window(rollout: int, steps: int, loss: float) -> Row:
    metrics = {"train/loss": loss, "rollout/reward_mean": loss / 2, "progress/images": 8.0}
    return Row("rollout", rollout, steps, metrics)


def evaluation(rollouts_done: int, reward: float) -> Row:
    return Row("eval", rollouts_done, 0, {"eval/reward_mean": reward, "progress/images": 8.0})


def panel(folder: Path, rollouts_done: int, shade: int) -> Panel:
    path = folder / f"{rollouts_done}-{shade}.png"
    Image.fromarray(np.full((4, 6, 3), shade, dtype=np.uint8)).save(path)
    pictures = (Picture(path, "a cat", 0.5), Picture(path, "a dog", 0.25))
    return Panel("eval/samples", rollouts_done, pictures)


def read(directory: Path) -> EventAccumulator:
    """As TensorBoard reads it, with every event."""
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0, "images": 0})
    return reader.Reload()


def points(directory: Path, tag: str) -> list[tuple[int, float]]:
    """(step, value)"""
    return [(event.step, event.value) for event in read(directory).Scalars(tag)]


def images(directory: Path, tag: str) -> list[tuple[int, bytes]]:
    """(step, PNG)"""
    return [(event.step, event.encoded_image_string) for event in read(directory).Images(tag)]


def test_train_is_drawn_over_steps_and_the_rest_over_rollouts_done(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tensorboard", 0, 0)
    for row in (evaluation(0, 0.25), window(0, 2, 0.5), window(1, 4, 1.5), evaluation(2, 0.75)):
        sink.log(row)
    shown = panel(tmp_path, 2, 200)
    sink.show(shown)
    sink.close()
    directory = tmp_path / "tensorboard"
    assert points(directory, "train/loss") == [(2, 0.5), (4, 1.5)]
    assert points(directory, "rollout/reward_mean") == [(1, 0.25), (2, 0.75)]
    assert points(directory, "eval/reward_mean") == [(0, 0.25), (2, 0.75)]
    assert points(directory, "progress/images") == [(1, 8.0), (2, 8.0)]
    png = shown.pictures[0].path.read_bytes()
    assert images(directory, "eval/samples/0001") == [(2, png)]
    assert read(directory).SummaryMetadata("eval/samples/0001").summary_description == "a dog"


def test_what_a_resume_took_back_is_there_once(tmp_path: Path) -> None:
    directory = tmp_path / "tensorboard"
    first = TensorBoardSink(directory, 0, 0)
    for row in (evaluation(0, 0.1), window(0, 2, 1.0), window(1, 4, 2.0), evaluation(2, 0.2)):
        first.log(row)
    first.show(panel(tmp_path, 0, 10))
    first.show(panel(tmp_path, 2, 20))
    for row in (window(2, 6, 99.0), window(3, 8, 99.0), evaluation(4, 99.0)):
        first.log(row)
    first.close()
    # What a kill in the middle of a write leaves.
    (file,) = directory.iterdir()
    file.write_bytes(file.read_bytes()[:-3])

    again = TensorBoardSink(directory, 2, 4)
    for row in (evaluation(2, 0.2), window(2, 6, 3.0)):
        again.log(row)
    again.show(panel(tmp_path, 2, 20))
    again.close()
    rewards = points(directory, "eval/reward_mean")
    assert [step for step, _ in rewards] == [0, 2]
    assert points(directory, "train/loss") == [(2, 1.0), (4, 2.0), (6, 3.0)]
    assert points(directory, "rollout/reward_mean") == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert [step for step, _ in images(directory, "eval/samples/0000")] == [0, 2]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_missing_package_names_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(UnirlError, match=r"report_to_tensorboard=true(?s:.*)unirl\[tensorboard\]"):
        TensorBoardSink(tmp_path, 0, 0)


def test_writing_needs_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from unirl.tracking.tensorboard_sink import TensorBoardSink\n"
        "from unirl.tracking.tracker import Row\n"
        "assert 'tensorboard' not in sys.modules\n"
        f"sink = TensorBoardSink(Path({str(tmp_path)!r}), 0, 0)\n"
        "sink.log(Row('eval', 0, 0, {'eval/reward_mean': 1.0})); sink.close()\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'tensorflow')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert points(tmp_path, "eval/reward_mean") == [(0, 1.0)]
