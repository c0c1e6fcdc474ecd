"""Runs every algorithm's recipe on the shipped model from the same start, and compares them.

One protocol for all: the same number of sampled images, the same held-out prompts and noise, the
same seeds. Each recipe keeps its own settings. Writes a table and a plot of the held-out OCR score
against denoiser evaluations (samples the network was run on, sampling and training together) and
against seconds of the training windows. Runs that are complete are not repeated, so it can be
stopped and started again, and several of it can share the work with `--recipes`. Seconds are those
of short runs apart, one after the other, so they need a machine that does nothing else (`--time`).

    python scripts/compare_algorithms.py --output runs/compare             # all, three seeds
    python scripts/compare_algorithms.py --output runs/compare --time      # then, with nothing else
    python scripts/compare_algorithms.py --output runs/compare --seeds 0 --recipes tiny_awm
    python scripts/compare_algorithms.py --output runs/compare --table     # only what is there
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from unirl.cli.compose import compose
from unirl.tracking.files import replacing
from unirl.tracking.jsonl import read_rows

FOLDER = "diffusion/tiny"
RECIPES = (
    "tiny_flow_grpo",
    "tiny_flow_grpo_fast",
    "tiny_dance_grpo",
    "tiny_mix_grpo",
    "tiny_mix_grpo_flash",
    "tiny_grpo_guard",
    "tiny_flow_dppo",
    "tiny_flash_grpo",
    "tiny_tempflow_grpo",
    "tiny_ddpo",
    "tiny_diffusion_nft",
    "tiny_awm",
    "tiny_diffusion_dpo",
    "tiny_draft",
    "tiny_alignprop",
    "tiny_refl",
    "tiny_distillation",
)
QUICKSTART = "quickstart"
TIMED_WINDOWS = 8
"""Of a timing run."""
OCR = ("eval/ocr_mean", "eval/judge_ocr_mean")
"""Reward in most recipes, judge in those that differentiate another one."""
COLOR = ("eval/color_mean", "eval/judge_color_mean")


@dataclass(frozen=True)
class Point:
    """One evaluation of a run."""

    evaluations: float
    """Denoiser evaluations of training until then, in thousands."""
    windows: int
    """Until then."""
    ocr: float
    color: float


@dataclass(frozen=True)
class Protocol:
    """What is the same for all."""

    output: Path
    num_images: int
    num_evaluations: int
    overrides: tuple[str, ...] = ()

    def interval(self, recipe: str) -> int:
        """Rollouts between evaluations."""
        config = compose(path_of(recipe), [])
        per_rollout = config.batch_size * config.sampling.samples_per_prompt
        return round(self.num_images / per_rollout / self.num_evaluations)

    def run(self, recipe: str, seed: int) -> None:
        """One run, unless it is there already."""
        if self.points(recipe, seed):
            return
        interval = self.interval(recipe)
        num_rollouts = interval * self.num_evaluations
        words = (f"num_rollouts={num_rollouts}", f"eval_interval={interval}", f"seed={seed}")
        self._start(recipe, f"{recipe}-{seed}", words)

    def seconds_per_window(self, recipe: str) -> float:
        """Of the timing run of a recipe, the median; NaN where there is none."""
        file = self.output / f"{recipe}-timing" / "metrics.jsonl"
        rows = read_rows(file) if file.is_file() else []
        found = [row.metrics["perf/total_seconds"] for row in rows if row.kind == "rollout"]
        return statistics.median(found) if len(found) == TIMED_WINDOWS else math.nan

    def time(self, recipe: str) -> None:
        """A few windows, to be timed on a machine that does nothing else."""
        if math.isnan(self.seconds_per_window(recipe)):
            words = (f"num_rollouts={TIMED_WINDOWS}", "eval_interval=0")
            self._start(recipe, f"{recipe}-timing", (*words, "seed=0"))

    def _start(self, recipe: str, run_name: str, words: Sequence[str]) -> None:
        shared = (f"output_dir={self.output}", "save_interval=0", "doctor=false", "num_threads=1")
        command = [sys.executable, "-m", "unirl.train_diffusion", path_of(recipe)]
        command += [f"run_name={run_name}", *shared, *words, *self.overrides]
        print(run_name, flush=True)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)

    def points(self, recipe: str, seed: int) -> list[Point]:
        """The evaluations of a run that is complete; nothing otherwise."""
        file = self.output / f"{recipe}-{seed}" / "metrics.jsonl"
        found = list(points(file)) if file.is_file() else []
        return found if len(found) == self.num_evaluations + 1 else []


def path_of(recipe: str) -> str:
    return recipe if recipe == QUICKSTART else f"{FOLDER}/{recipe}"


def points(metrics_jsonl: Path) -> Iterator[Point]:
    evaluations, windows = 0.0, 0
    for row in read_rows(metrics_jsonl):
        if row.kind == "rollout":
            evaluations += row.metrics["perf/total_denoiser_forwards"] / 1e3
            windows += 1
        else:
            ocr, color = (
                next(row.metrics[name] for name in names if name in row.metrics)
                for names in (OCR, COLOR)
            )
            yield Point(evaluations, windows, ocr, color)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--recipes", nargs="*", default=[QUICKSTART, *RECIPES])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--images", type=int, default=7680, help="sampled in each run")
    parser.add_argument("--evaluations", type=int, default=4, help="besides the first one")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--time", action="store_true", help="time a few windows of each recipe")
    args = parser.parse_args()
    protocol = Protocol(args.output, args.images, args.evaluations)
    if args.time:
        for recipe in args.recipes:
            protocol.time(recipe)
    elif not args.table:
        for seed in args.seeds:
            for recipe in args.recipes:
                protocol.run(recipe, seed)
    curves = {r: [protocol.points(r, seed) for seed in args.seeds] for r in args.recipes}
    complete = {recipe: runs for recipe, runs in curves.items() if all(runs)}
    seconds = {recipe: protocol.seconds_per_window(recipe) for recipe in complete}
    table = markdown(complete, seconds, args.seeds)
    (args.output / "table.md").write_text(table)
    plot(complete, seconds, args.output / "curves.png")
    print(table)
    for recipe in curves.keys() - complete.keys():
        print(f"left out, not complete: {recipe}")


def markdown(
    curves: dict[str, list[list[Point]]], seconds: dict[str, float], seeds: Sequence[int]
) -> str:
    """A row per recipe, best held-out OCR first."""
    columns = (
        "recipe",
        "OCR before",
        f"OCR after, mean of seeds {', '.join(map(str, seeds))}",
        "lowest, highest",
        "colour before",
        "colour after",
        "denoiser evaluations",
        "seconds",
    )
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    order = sorted(curves, key=lambda name: -mean([points[-1].ocr for points in curves[name]]))
    for name in order:
        runs = curves[name]
        last = [points[-1].ocr for points in runs]
        lines.append(
            f"| {name} | {mean([p[0].ocr for p in runs]):.3f} | **{mean(last):.3f}** | "
            f"{min(last):.3f}, {max(last):.3f} | {mean([p[0].color for p in runs]):.3f} | "
            f"{mean([p[-1].color for p in runs]):.3f} | "
            f"{mean([p[-1].evaluations for p in runs]):.0f} k | "
            f"{runs[0][-1].windows * seconds[name]:.0f} |"
        )
    return "\n".join(lines) + "\n"


def plot(curves: dict[str, list[list[Point]]], seconds: dict[str, float], path: Path) -> None:
    """Held-out OCR, mean over seeds, against both costs."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6), layout="constrained")
    FigureCanvasAgg(figure)
    by_evaluations, by_seconds = figure.subplots(1, 2, sharey=True)
    for number, (name, runs) in enumerate(curves.items()):
        steps = list(zip(*runs, strict=True))
        scores = [mean([point.ocr for point in step]) for step in steps]
        style = {
            "color": colormaps["tab20"](number % 20),
            "marker": "o",
            "markersize": 3,
            "label": name.removeprefix("tiny_"),
        }
        by_evaluations.plot([mean([p.evaluations for p in s]) for s in steps], scores, **style)
        by_seconds.plot([s[0].windows * seconds[name] for s in steps], scores, **style)
    by_evaluations.set(xlabel="denoiser evaluations, thousands", ylabel="held-out OCR score")
    by_seconds.set(xlabel="seconds of training windows, one thread")
    for axes in (by_evaluations, by_seconds):
        axes.grid(alpha=0.3)
    by_seconds.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110)


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


if __name__ == "__main__":
    main()
