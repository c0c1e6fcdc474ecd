"""Curves of a run as pictures, from its `metrics.jsonl`: reward over rollouts, and over costs.

matplotlib is imported on use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from unirl.tracking.files import replacing
from unirl.tracking.jsonl import read_rows
from unirl.tracking.tracker import Row

COSTS = {
    "progress/wall_seconds": "seconds",
    "progress/device_seconds": "device seconds",
    "progress/images": "images sampled for training",
    "progress/denoiser_evaluations": "denoiser evaluations",
}
"""What a reward can be bought with."""


def save_curves(metrics_jsonl: Path, path: Path) -> None:
    """A PNG: training reward per rollout on the left, held-out evaluation on the right.

    Both are drawn over the number of rollouts done.

    Raises:
        UnirlError: the file cannot be written.
    """
    # The object interface draws without a display and leaves pyplot's global state alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(read_rows(metrics_jsonl))
    rollouts = [row for row in rows if row.kind == "rollout"]
    evaluations = [row for row in rows if row.kind == "eval"]

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    train, heldout = figure.subplots(1, 2)
    train.set(title="training reward", xlabel="rollouts", ylabel="reward")
    if rollouts:
        done = [row.rollout + 1 for row in rollouts]
        mean, std = (
            [row.metrics[f"rollout/reward_{part}"] for row in rollouts] for part in ("mean", "std")
        )
        low = [m - s for m, s in zip(mean, std, strict=True)]
        high = [m + s for m, s in zip(mean, std, strict=True)]
        train.fill_between(done, low, high, alpha=0.15, linewidth=0, label="± standard deviation")
        train.plot(done, mean, label="mean of all samples")
        train.legend()
    heldout.set(title="evaluation, same prompts and noise each time", xlabel="rollouts")
    for name in _curve_names(row.metrics.keys() for row in evaluations):
        points = [(row.rollout, row.metrics[name]) for row in evaluations if name in row.metrics]
        # What training never sees is dashed, so that reward hacking catches the eye.
        unseen = name.startswith("eval/judge_") or name.count("/") > 1  # judges and suites
        style = "--" if unseen else "-"
        label = name.removeprefix("eval/").removesuffix("_mean")
        heldout.plot(*zip(*points, strict=True), style, marker="o", markersize=4, label=label)
    if evaluations:
        heldout.legend()
    for axes in (train, heldout):
        axes.grid(alpha=0.3)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120)


def save_costs(metrics_jsonl: Path, path: Path) -> None:
    """A PNG: reward above gradient norm, over wall time, device time, images and denoiser
    evaluations.

    Raises:
        UnirlError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(read_rows(metrics_jsonl))
    figure = Figure(figsize=(15, 6), layout="constrained")
    FigureCanvasAgg(figure)
    curves = {
        "rollout/reward_mean": ("training", 0, "-"),
        "eval/reward_mean": ("evaluation", 0, "o-"),
        "train/grad_norm": ("gradient norm", 1, "-"),
    }
    all_axes = figure.subplots(2, len(COSTS), sharex="col", sharey="row")
    for column, (cost, label) in enumerate(COSTS.items()):
        for name, (legend, line, style) in curves.items():
            points = _points(rows, cost, name)
            if points:
                axes = all_axes[line, column]
                axes.plot(*zip(*points, strict=True), style, markersize=4, label=legend)
        all_axes[1, column].set(xlabel=label)
    all_axes[0, 0].set(ylabel="reward")
    all_axes[1, 0].set(ylabel="gradient norm before clipping")
    if all_axes[0, 0].lines:
        all_axes[0, 0].legend()
    for axes in all_axes.flat:
        axes.grid(alpha=0.3)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120)


def _points(rows: Sequence[Row], cost: str, name: str) -> list[tuple[float, float]]:
    """(cost, value) of the rows that have both."""
    return [(r.metrics[cost], r.metrics[name]) for r in rows if {cost, name} <= r.metrics.keys()]


def _curve_names(names_of_rows: Iterable[Iterable[str]]) -> list[str]:
    """Names of evaluation means, in order of first appearance."""
    seen = dict.fromkeys(name for names in names_of_rows for name in names)
    return [name for name in seen if name.endswith("_mean")]
