"""The curves of a run can always be drawn, whatever it got round to."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from unirl.tracking.jsonl import JsonlSink
from unirl.tracking.plots import COSTS, save_costs, save_curves
from unirl.tracking.tracker import Row

ROLLOUTS = [
    Row("rollout", i, i + 1, {"rollout/reward_mean": i / 9, "rollout/reward_std": 0.1})
    for i in range(9)
]
EVALS = [
    Row(
        "eval", i, i, {"eval/ocr_mean": i / 9, "eval/judge_strict_mean": 0.2, "eval/num_samples": 8}
    )
    for i in (0, 4, 9)
]


@pytest.mark.parametrize("rows", [[], ROLLOUTS, EVALS[:1], [*ROLLOUTS, *EVALS]])
def test_curves_are_one_picture(tmp_path, rows):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for row in rows:
        sink.log(row)
    sink.close()
    save_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.size == (1320, 480)
        pixels = np.asarray(picture.convert("RGB"))
    first_curve = (31, 119, 180)
    assert (pixels == first_curve).all(axis=-1).any() == bool(rows)


COSTLY = [
    Row(
        r.kind,
        r.rollout,
        r.optimizer_step,
        {**r.metrics, **dict.fromkeys(COSTS, r.rollout * 9.0), "train/grad_norm": 1.0},
    )
    for r in ROLLOUTS
]


@pytest.mark.parametrize("rows", [[], ROLLOUTS, COSTLY])
def test_costs_are_one_picture_with_curves_where_costs_were_logged(tmp_path, rows):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for row in rows:
        sink.log(row)
    sink.close()
    save_costs(tmp_path / "metrics.jsonl", tmp_path / "costs.png")
    with Image.open(tmp_path / "costs.png") as picture:
        assert picture.size == (1800, 720)
        pixels = np.asarray(picture.convert("RGB"))
    drawn = (pixels == (31, 119, 180)).all(axis=-1).any(axis=0)
    quarters = [bool(part.any()) for part in np.array_split(drawn, 4)]
    assert quarters == [rows is COSTLY] * 4


def test_tracking_imports_neither_matplotlib_nor_wandb_nor_torch():
    code = (
        "import sys, unirl.tracking.plots, unirl.tracking.wandb_sink, unirl.tracking.console;"
        "sys.exit(any(name in sys.modules for name in ('matplotlib', 'wandb', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
