"""Is the training sound? Small drawings of what goes wrong first, each with a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from unirl.report.charts import Axis, Level, Line, Titled, draw
from unirl.report.numbers import figure
from unirl.report.shown import ShownRun
from unirl.tracking.metrics import describe
from unirl.tracking.tracker import Row

_MOST_POINTS = 240


@dataclass(frozen=True)
class _Sign:
    """One thing to watch."""

    title: str
    metric: str
    sentence: str
    std: str | None = None
    """The metric of the spread around it."""
    minus: float = 0.0
    """Taken off, where what matters is the distance from a value."""
    floor: float | None = 0.0
    compares: bool = False
    """Of no meaning where there is one sample of each prompt."""
    is_a_setting: bool = False
    """A value that never changes is nothing to look at, whatever it is."""
    level: tuple[str, str] | None = None
    """Key of the config and label of a limit."""


_SIGNS = (
    _Sign(
        "Probability ratio, less 1",
        "train/ratio_mean",
        "New over old probability of the recorded steps. It should stay near 0 here, and most of "
        "its spread within the clip range.",
        std="train/ratio_std",
        minus=1.0,
        floor=None,
    ),
    _Sign(
        "Clipped",
        "train/clip_fraction",
        "Part of the rows whose ratio left the clip range, which teach nothing more. Much of it "
        "means that updates are too large.",
    ),
    _Sign(
        "Distance from the sampling policy",
        "train/approx_kl",
        "Grows with each update on the same samples; a jump comes before a collapse. Nats per "
        "latent element.",
    ),
    _Sign(
        "Distance from the reference",
        "train/kl_reference",
        "How far the policy has gone from where it started. It should grow slowly.",
    ),
    _Sign(
        "Distance from the old policy",
        "train/kl_old_mean",
        "Mean over the recorded steps; those beyond the threshold are left out of the loss.",
    ),
    _Sign(
        "Advantages",
        "rollout/advantage_mean",
        "Mean and standard deviation. By construction the mean is near 0 and the deviation near "
        "1, or below it where several scorers are added.",
        std="rollout/advantage_std",
        floor=None,
        compares=True,
    ),
    _Sign(
        "Groups without a difference",
        "rollout/zero_std_group_ratio",
        "Part of the prompts whose samples all got the same reward: nothing is learned from them.",
        compares=True,
    ),
    _Sign(
        "Gradient norm",
        "train/grad_norm",
        "Before clipping. Steady is good; what lies above the limit is scaled down to it.",
        level=("stack.max_grad_norm", "limit"),
    ),
    _Sign(
        "Skipped steps",
        "train/skipped_steps",
        "Optimizer steps not taken because the gradient was not finite, or zero.",
    ),
    _Sign(
        "Dropped groups",
        "rollout/dropped_groups",
        "Prompts left out because a scorer failed.",
    ),
    _Sign(
        "Preference accuracy",
        "train/preference_accuracy",
        "Part of the pairs that the policy ranks as the reward does; 0.5 is chance.",
    ),
    _Sign(
        "Learning rate",
        "train/lr",
        "Mean over the optimizer steps of a window.",
        is_a_setting=True,
    ),
)

_PARTS = ("_min", "_max", "_std", "_high", "_low")
"""Ends of names whose mean is shown already."""
_LEFT_OUT = {"train/optimizer_step", "train/policy_loss", "train/log_ratio_abs_max"}


@dataclass(frozen=True)
class Health:
    drawn: tuple[Titled, ...]
    quiet: tuple[tuple[str, str], ...]
    """What had the same value all the time: title and value."""
    others: tuple[Titled, ...]
    """The algorithm's own metrics, in the words of the catalogue."""


def health(runs: Sequence[ShownRun]) -> Health:
    drawn, quiet = [], []
    signs = _SIGNS if len(runs) == 1 else [_of_several(sign) for sign in _SIGNS]
    for sign in signs:
        lines = list(_lines(runs, sign))
        value = _constant(lines)
        if value is not None and (value == 0 or sign.is_a_setting):
            quiet.append((sign.title, f"{figure(value)} throughout"))
        elif lines:
            drawn.append(_titled(runs, sign, lines))
    return Health(tuple(drawn), tuple(quiet), tuple(_others(runs)))


def _of_several(sign: _Sign) -> _Sign:
    """Bands of several runs would hide each other; where a spread matters it is the line."""
    if sign.std is None:
        return sign
    title = f"{sign.title}: standard deviation"
    return replace(sign, title=title, metric=sign.std, std=None, minus=0.0, floor=0.0)


def _others(runs: Sequence[ShownRun]) -> Iterator[Titled]:
    """Every varying metric of the training steps that no sign shows."""
    shown = {sign.metric for sign in _SIGNS} | _LEFT_OUT
    names = dict.fromkeys(
        name
        for run in runs
        for row in run.files.of_kind("rollout")[:1]
        for name in row.metrics
        if name.startswith("train/") and name not in shown and not name.endswith(_PARTS)
    )
    for name in names:
        sign = _Sign(
            name.removeprefix("train/").replace("_", " "), name, _meaning(name), floor=None
        )
        lines = list(_lines(runs, sign))
        if lines and _constant(lines) is None:
            yield _titled(runs, sign, lines)


def _meaning(name: str) -> str:
    try:
        metric = describe(name)
    except LookupError:
        return "A metric of the run's own."
    sentence = metric.meaning[:1].upper() + metric.meaning[1:]
    return f"{sentence}; {metric.unit}." if metric.unit else f"{sentence}."


def _lines(runs: Sequence[ShownRun], sign: _Sign) -> Iterator[Line]:
    for run in runs:
        rows = [row for row in run.files.of_kind("rollout") if sign.metric in row.metrics]
        if not rows or (sign.compares and not _compares(run)):
            continue
        ys = [row.metrics[sign.metric] - sign.minus for row in rows]
        lows, highs = _spread(rows, ys, sign) if len(runs) == 1 else ((), ())
        yield Line(
            run.label,
            [row.rollout + 1 for row in rows],
            ys,
            run.colour,
            lows=lows,
            highs=highs,
            dashed=run.dashed,
        )


def _compares(run: ShownRun) -> bool:
    """Whether there are siblings to compare a sample with."""
    return _setting(run, "sampling.samples_per_prompt") != 1


def _spread(
    rows: Sequence[Row], ys: Sequence[float], sign: _Sign
) -> tuple[Sequence[float], Sequence[float]]:
    if sign.std is None:
        return (), ()
    stds = [row.metrics.get(sign.std, math.nan) for row in rows]
    return (
        [y - std for y, std in zip(ys, stds, strict=True)],
        [y + std for y, std in zip(ys, stds, strict=True)],
    )


def _constant(lines: Sequence[Line]) -> float | None:
    """The value that all lines have everywhere, without a spread."""
    values = {y for line in lines for y in (*line.ys, *line.lows, *line.highs)}
    return values.pop() if len(values) == 1 and math.isfinite(min(values)) else None


def _titled(runs: Sequence[ShownRun], sign: _Sign, lines: Sequence[Line]) -> Titled:
    drawing = draw(
        lines,
        Axis("rollouts", text=lambda value: f"rollout {value:,.0f}", whole=True),
        floor=sign.floor,
        levels=list(_levels(runs, sign)),
        most_points=max(80, _MOST_POINTS // len(lines)),
        num_x_ticks=4,
        num_y_ticks=4,
    )
    finite = [y for y in lines[0].ys if math.isfinite(y)]
    value = figure(finite[-1]) if finite and len(runs) == 1 else ""
    return Titled(sign.title, sign.sentence, drawing, value)


def _levels(runs: Sequence[ShownRun], sign: _Sign) -> Iterator[Level]:
    if sign.metric == "train/ratio_mean":
        yield from _clip_range(runs)
    if sign.level is not None:
        key, label = sign.level
        values = {_setting(run, key) for run in runs}
        if len(values) == 1 and (value := values.pop()) is not None:
            yield Level(label, value)


def _clip_range(runs: Sequence[ShownRun]) -> Iterator[Level]:
    """Of the algorithms that have one, where all runs have the same."""
    clips = any("train/clip_fraction" in row.metrics for run in runs for row in run.files.rows[:3])
    lows = {_setting(run, "algorithm.clip_range") for run in runs}
    highs = {_setting(run, "algorithm.clip_range_high") for run in runs}
    if clips and len(lows) == len(highs) == 1 and (low := lows.pop()) is not None:
        yield Level("clip range", -low)
        high = highs.pop()
        yield Level("clip range", low if high is None else high)


def _setting(run: ShownRun, key: str) -> float | None:
    block = run.files.config
    *parents, leaf = key.split(".")
    for parent in parents:
        block = block.get(parent) or {}
    value = block.get(leaf)
    return float(value) if isinstance(value, int | float) else None
