"""Held-out and training reward: the curves that a run is made for, over whatever it has cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from unirl.report import numbers
from unirl.report.charts import Axis, Drawing, Line, Titled, draw
from unirl.report.numbers import PER_CENT_95
from unirl.report.reading import RunFiles
from unirl.report.scales import Scale
from unirl.report.settings import evaluated_differently
from unirl.report.shown import Family, ShownRun
from unirl.report.thinning import running_mean
from unirl.tracking.intervals import confidence_interval, scores_by_prompt
from unirl.tracking.tracker import Row

REWARD = "eval/reward_mean"
_JUDGE = "judge_"
_MANY_ROWS = 60
"""From here on a training curve is shown as a running mean, with every window behind it."""


@dataclass(frozen=True)
class View:
    """All curves over one axis."""

    name: str
    heldout: Titled | None
    training: Titled | None
    scores: tuple[Titled, ...]


@dataclass(frozen=True)
class _Cost:
    """Something a run goes along."""

    name: str
    metric: str | None
    """None: rollouts, which every row has."""
    is_time: bool = False

    def of(self, row: Row) -> float:
        if self.metric is None:
            return row.rollout + (row.kind == "rollout")
        return row.metrics[self.metric]

    def is_in(self, rows: Sequence[Row]) -> bool:
        return self.metric is None or all(
            math.isfinite(row.metrics.get(self.metric, math.nan)) for row in rows
        )


_COSTS = (
    _Cost("Rollouts", None),
    _Cost("Wall time", "progress/wall_seconds", is_time=True),
    _Cost("Device time", "progress/device_seconds", is_time=True),
    _Cost("Images", "progress/images"),
    _Cost("Denoiser evaluations", "progress/denoiser_evaluations"),
)


@dataclass(frozen=True)
class _Curve:
    xs: Sequence[float]
    ys: Sequence[float]
    breaks: Sequence[float] = ()


def views(groups: Sequence[Family]) -> list[View]:
    """One for each axis that all the runs have."""
    rows = _all_rows(groups)
    costs = [cost for cost in _COSTS if cost.is_in(rows)]
    return [_view(groups, cost, _axis(cost, rows)) for cost in costs] if rows else []


def _all_rows(groups: Sequence[Family]) -> list[Row]:
    return [row for group in groups for run in group.runs for row in run.files.rows]


def _only(groups: Sequence[Family]) -> ShownRun | None:
    """The run, where there is but one."""
    return groups[0].runs[0] if len(groups) == 1 and len(groups[0].runs) == 1 else None


def _mean_sentence(groups: Sequence[Family]) -> str:
    """What a bold line is; empty where there is none."""
    units = {group.unit for group in groups if len(group.runs) > 1}
    if not units:
        return ""
    over = "runs" if "runs" in units else "seeds"
    return f" Bold: the mean over {over}, with one standard deviation; thin: each run."


def _axis(cost: _Cost, rows: Sequence[Row]) -> Axis:
    if not cost.is_time:
        name = cost.name.lower()
        return Axis(name, text=lambda value: f"{value:,.0f} {name}", whole=True)
    longest = max(cost.of(row) for row in rows)
    unit, divisor = next(
        (unit for unit in (("h", 3600.0), ("min", 60.0)) if longest >= 2 * unit[1]), ("s", 1.0)
    )
    return Axis(f"{cost.name.lower()}, {unit}", divisor, text=numbers.duration)


def _view(groups: Sequence[Family], cost: _Cost, axis: Axis) -> View:
    whole = Scale.around([cost.of(row) for row in _all_rows(groups)] + [0.0])
    most = max(120, 600 // sum(len(group.runs) for group in groups))

    def drawn(lines: Sequence[Line], num_x_ticks: int = 6, num_y_ticks: int = 5) -> Drawing:
        return draw(
            lines,
            axis,
            x_scale=whole,
            most_points=most,
            num_x_ticks=num_x_ticks,
            num_y_ticks=num_y_ticks,
            value_text=numbers.reward,
        )

    heldout, training = _heldout_lines(groups, cost, REWARD), _training_lines(groups, cost)
    title = evaluation_title([run.files for group in groups for run in group.runs])
    return View(
        cost.name,
        Titled(title, _heldout_sentence(groups), drawn(heldout)) if heldout else None,
        Titled("Training reward", _training_sentence(groups), drawn(training))
        if training
        else None,
        tuple(_scores(groups, cost, drawn)),
    )


def _changes_of_evaluation(groups: Sequence[Family]) -> list[str]:
    """A sentence each, with the run's name where there are several."""
    only = _only(groups)
    return [
        change.sentence if only else f"{run.label}: {change.sentence}"
        for group in groups
        for run in group.runs
        for change in run.files.evaluation_changes
    ]


def evaluation_title(runs: Sequence[RunFiles]) -> str:
    """Without data.eval a run is evaluated on the prompts that it is trained on."""
    held_out = all(run.has_held_out_prompts for run in runs)
    return "Held-out reward" if held_out else "Reward at evaluation"


def _heldout_sentence(groups: Sequence[Family]) -> str:
    runs = [run.files for group in groups for run in group.runs]
    held_out = all(run.has_held_out_prompts for run in runs)
    prompts = "Prompts that training never sees" if held_out else "Prompts that are trained on too"
    if changes := _changes_of_evaluation(groups):
        same = " ".join([f"{prompts}.", *changes])
    elif evaluated_differently(runs):
        same = f"{prompts}. The runs were not evaluated in the same way."
    else:
        same = f"{prompts}, with the same noise in every evaluation."
    if mean := _mean_sentence(groups):
        return f"{same}{mean}"
    only = _only(groups)
    if only is None or not any(map(math.isfinite, _known_half_widths(only))):
        return same
    return f"{same} Bars: {PER_CENT_95} interval over prompts."


def _known_half_widths(run: ShownRun) -> list[float]:
    rows = [row for row in run.files.of_kind("eval") if REWARD in row.metrics]
    return half_widths(run.files, rows, REWARD)


def _training_sentence(groups: Sequence[Family]) -> str:
    only = _only(groups)
    if only is None:
        width = max(_width(run) for group in groups for run in group.runs)
        smooth = f" Running mean over up to {width} windows." if width > 1 else ""
        return f"Of the samples trained on.{smooth}{_mean_sentence(groups)}"
    if (width := _width(only)) > 1:
        return (
            f"Of the samples trained on. Line: running mean over {width} windows; behind it every "
            "window; band: one standard deviation of the samples."
        )
    return "Of the samples trained on: mean of each window, and one standard deviation around it."


def _scores(
    groups: Sequence[Family], cost: _Cost, drawn: Callable[..., Drawing]
) -> Iterator[Titled]:
    """What the reward is made of, then the judges, which are dashed."""
    names = dict.fromkeys(
        name
        for row in _all_rows(groups)
        if row.kind == "eval"
        for name in row.metrics
        if name.endswith("_mean") and name != REWARD
    )
    only = _only(groups)
    for name in sorted(names, key=_order):
        judges = _JUDGE in name
        lines = _heldout_lines(groups, cost, name)
        if not lines:
            continue
        yield Titled(
            _score_title(name),
            _score_sentence(name),
            drawn([replace(line, dashed=judges) for line in lines], num_x_ticks=4, num_y_ticks=4),
            "" if only is None else _first_and_last(only.files, name),
        )


def _order(name: str) -> tuple[bool, bool]:
    """Scores of the reward, then judges, then what further suites have."""
    return name.count("/") > 1, _JUDGE in name


def _score_title(name: str) -> str:
    """`eval/judge_exact_read_mean` is "exact read", `eval/hard/ocr_mean` "hard: ocr"."""
    *suite, score = name.removeprefix("eval/").split("/")
    score = score.removeprefix(_JUDGE).removesuffix("_mean").replace("_", " ")
    return ": ".join([*suite, score])


def _score_sentence(name: str) -> str:
    if name.count("/") > 1:
        return f"Of the evaluation suite {name.split('/')[1]}."
    return "A judge that training never sees." if _JUDGE in name else "Part of the reward."


def _first_and_last(run: RunFiles, metric: str) -> str:
    values = [numbers.reward(row.metrics[metric]) for row in run.comparable_evaluations(metric)]
    return f"{values[0]} → {values[-1]}" if len(values) > 1 else "".join(values)


def _heldout_lines(groups: Sequence[Family], cost: _Cost, metric: str) -> list[Line]:
    only = _only(groups)
    if only is not None:
        rows = [row for row in only.files.of_kind("eval") if metric in row.metrics]
        xs, ys = [cost.of(row) for row in rows], [row.metrics[metric] for row in rows]
        half = half_widths(only.files, rows, metric)
        known = any(map(math.isfinite, half))
        line = Line(
            only.label,
            xs,
            ys,
            lows=[y - width for y, width in zip(ys, half, strict=True)] if known else (),
            highs=[y + width for y, width in zip(ys, half, strict=True)] if known else (),
            dots=True,
            breaks=_breaks(only, cost),
        )
        return [line] if rows else []

    def curve(run: ShownRun) -> _Curve:
        rows = [row for row in run.files.of_kind("eval") if metric in row.metrics]
        ys = [row.metrics[metric] for row in rows]
        return _Curve([cost.of(row) for row in rows], ys, _breaks(run, cost))

    return [line for group in groups for line in _family_lines(group, curve, dots=True)]


def _breaks(run: ShownRun, cost: _Cost) -> list[float]:
    """Where evaluations cannot be compared across: at what had been trained by then."""
    trained = run.files.of_kind("rollout")
    return [
        max((cost.of(row) for row in trained if row.rollout < change.rollout), default=0.0)
        for change in run.files.evaluation_changes
    ]


def half_widths(run: RunFiles, rows: Sequence[Row], metric: str) -> list[float]:
    """Of the 95 % intervals of a mean over prompts, as they were logged; else, for the reward,
    from the samples that were written down. NaN where neither is there."""
    from_samples: dict[int, float] = {}
    if metric == REWARD:
        for evaluation in run.evaluations:
            if rewards := scores_by_prompt(evaluation.samples).get("reward"):
                interval = confidence_interval(list(rewards.values()))
                from_samples[evaluation.step] = interval.half_width
    name = f"{metric.removesuffix('_mean')}_ci95"
    return [row.metrics.get(name, from_samples.get(row.rollout, math.nan)) for row in rows]


def _training_lines(groups: Sequence[Family], cost: _Cost) -> list[Line]:
    only = _only(groups)
    if only is None:

        def curve(run: ShownRun) -> _Curve:
            return _smooth_training(run, cost)

        return [line for group in groups for line in _family_lines(group, curve, dots=False)]
    rows = [r for r in only.files.of_kind("rollout") if "rollout/reward_mean" in r.metrics]
    if not rows:
        return []
    xs = [cost.of(row) for row in rows]
    means = [row.metrics["rollout/reward_mean"] for row in rows]
    width = _width(only)
    stds = [row.metrics.get("rollout/reward_std", math.nan) for row in rows]
    smooth, spread = running_mean(means, width), running_mean(stds, width)
    mean_line = Line(
        only.label,
        xs,
        smooth,
        colour=1,
        lows=[mean - std for mean, std in zip(smooth, spread, strict=True)],
        highs=[mean + std for mean, std in zip(smooth, spread, strict=True)],
    )
    if width == 1:
        return [mean_line]
    return [Line("every window", xs, means, colour=1, pale=True, spoken=False), mean_line]


def _smooth_training(run: ShownRun, cost: _Cost) -> _Curve:
    rows = [row for row in run.files.of_kind("rollout") if "rollout/reward_mean" in row.metrics]
    means = [row.metrics["rollout/reward_mean"] for row in rows]
    return _Curve([cost.of(row) for row in rows], running_mean(means, _width(run)))


def _width(run: ShownRun) -> int:
    """Windows that a running mean goes over: an odd number, 1 where there are few."""
    number = len(run.files.of_kind("rollout"))
    return 1 if number < _MANY_ROWS else max(5, number // 25) // 2 * 2 + 1


def _family_lines(group: Family, curve: Callable[[ShownRun], _Curve], dots: bool) -> Iterator[Line]:
    """A line for a run by itself; of seeds each as a thin line, and their mean."""
    curves = [found for run in group.runs if (found := curve(run)).ys]
    if not curves:
        return
    if len(curves) == 1:
        (one,) = curves
        yield Line(
            group.label,
            one.xs,
            one.ys,
            group.colour,
            dots=dots,
            dashed=group.dashed,
            breaks=one.breaks,
        )
        return
    for one in curves:
        yield Line(
            group.label,
            one.xs,
            one.ys,
            group.colour,
            pale=True,
            spoken=False,
            breaks=one.breaks,
        )
    length = min(len(one.ys) for one in curves)
    xs = [fmean(one.xs[place] for one in curves) for place in range(length)]
    at = [[one.ys[place] for one in curves] for place in range(length)]
    means = [fmean(values) for values in at]
    stds = [stdev(values) if all(map(math.isfinite, values)) else math.nan for values in at]
    yield Line(
        group.label,
        xs,
        means,
        group.colour,
        lows=[mean - std for mean, std in zip(means, stds, strict=True)],
        highs=[mean + std for mean, std in zip(means, stds, strict=True)],
        dashed=group.dashed,
        breaks=[x for one in curves for x in one.breaks],
    )
