"""Reward curves of a run as one picture, from its `metrics.jsonl`.

matplotlib is imported on use.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from unirl.tracking.files import replacing
from unirl.tracking.jsonl import read_rows


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
        style = "--" if name.startswith("eval/judge_") else "-"
        label = name.removeprefix("eval/").removesuffix("_mean")
        heldout.plot(*zip(*points, strict=True), style, marker="o", markersize=4, label=label)
    if evaluations:
        heldout.legend()
    for axes in (train, heldout):
        axes.grid(alpha=0.3)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120)


def _curve_names(names_of_rows: Iterable[Iterable[str]]) -> list[str]:
    """Names of evaluation means, in order of first appearance."""
    seen = dict.fromkeys(name for names in names_of_rows for name in names)
    return [name for name in seen if name.endswith("_mean")]
