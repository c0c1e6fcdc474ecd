"""What a run is and what came of it: the head of the page, and a row of the table of runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, stdev

from unirl.report import numbers
from unirl.report.learning import REWARD, evaluation_title, half_widths
from unirl.report.reading import RunFiles
from unirl.report.shown import Family, ShownRun
from unirl.tracking.intervals import Interval, paired_changes
from unirl.tracking.tracker import Row


@dataclass(frozen=True)
class Result:
    """First and last held-out reward. Half widths of 95 % intervals over prompts are empty where
    samples were not written down."""

    first: str
    first_width: str
    first_when: str
    """Empty at the start of a run that was evaluated again."""
    last: str
    last_width: str
    last_when: str
    """Empty at the end of what is done."""
    change: str
    change_width: str
    direction: str
    """better or worse where the change is beyond its interval, else same."""
    sentence: str


@dataclass(frozen=True)
class Summary:
    label: str
    colour: int
    dashed: bool
    state: str
    outcome: str
    description: str
    facts: tuple[tuple[str, str], ...]
    evaluation: str
    """Held-out reward, or what it is instead."""
    result: Result | None
    why_no_result: str
    training: str
    """Mean training reward of the last tenth of the run."""
    when: str
    path: str


def summarize(run: ShownRun) -> Summary:
    outcome = run.outcome
    return Summary(
        label=run.label,
        colour=run.colour,
        dashed=run.dashed,
        state=outcome.state,
        outcome=outcome.sentence,
        description=str(run.files.config.get("description") or ""),
        facts=tuple(_facts(run)),
        evaluation=evaluation_title([run.files]),
        result=_result(run),
        why_no_result=run.files.why_no_evaluation,
        training=_training(run),
        when=_when(run),
        path=str(run.files.path),
    )


@dataclass(frozen=True)
class Spread:
    """Means over runs that differ in their seed at most, each with one standard deviation."""

    label: str
    colour: int
    dashed: bool
    unit: str
    """`seeds`, or `runs` where some have the same."""
    last: str
    change: str


def spread_of(group: Family) -> Spread | None:
    """None for a run by itself, or where fewer than two were evaluated."""
    courses = [
        [row.metrics[REWARD] for row in run.files.comparable_evaluations(REWARD)]
        for run in group.runs
    ]
    ends = [(course[0], course[-1]) for course in courses if course]
    if len(ends) < 2 or not all(map(math.isfinite, chain.from_iterable(ends))):
        return None
    lasts, changes = [last for _, last in ends], [last - first for first, last in ends]
    return Spread(
        group.label,
        group.colour,
        group.dashed,
        group.unit,
        last=f"{numbers.reward(fmean(lasts))} ± {numbers.reward(stdev(lasts))}",
        change=f"{numbers.change(fmean(changes))} ± {numbers.reward(stdev(changes))}",
    )


def _facts(run: ShownRun) -> Iterator[tuple[str, str]]:
    config, outcome = run.files.config, run.outcome
    model = config["model"]
    yield "Model", f"{model.get('family')} · {model.get('path')}"
    if algorithm := (config.get("algorithm") or {}).get("path"):
        yield "Algorithm", str(algorithm)
    if "stack" in config:
        lora = config["stack"].get("lora")
        yield "Trained", "all weights" if lora is None else f"LoRA of rank {lora.get('rank')}"
    if devices := config.get("num_devices"):
        kind = config.get("device", "auto")
        yield "Devices", f"{devices}" + (f", {kind}" if kind != "auto" else "")
    if "seed" in config:
        yield "Seed", str(config["seed"])
    yield "Rollouts", f"{outcome.done:,} of {outcome.total:,}"
    if outcome.wall_seconds is not None:
        yield "Wall time", numbers.duration(outcome.wall_seconds)
    last = run.files.rows[-1].metrics if run.files.rows else {}
    if "progress/images" in last:
        yield "Images", numbers.count(last["progress/images"])
    if "progress/denoiser_evaluations" in last:
        yield "Denoiser evaluations", numbers.count(last["progress/denoiser_evaluations"])


def _result(run: ShownRun) -> Result | None:
    rows = run.files.comparable_evaluations(REWARD)
    if not rows:
        return None
    first, last = rows[0].metrics[REWARD], rows[-1].metrics[REWARD]
    widths = [_plus_minus(half) for half in half_widths(run.files, rows, REWARD)]
    change = _paired_change(run, rows[0].rollout, rows[-1].rollout)
    gain = change.mean if change is not None else last - first
    return Result(
        first=numbers.reward(first),
        first_width=widths[0],
        first_when=_when_first(run, rows),
        last=numbers.reward(last),
        last_width=widths[-1],
        last_when=_when_evaluated(run, rows[-1].rollout),
        change=numbers.change(gain) if len(rows) > 1 else "",
        change_width=_plus_minus(change.half_width) if change else "",
        direction=_direction(change),
        sentence=_sentence(run.files, len(rows), gain, change),
    )


def _when_first(run: ShownRun, rows: Sequence[Row]) -> str:
    step = rows[0].rollout
    if step == 0:
        return "before training" if len(rows) == 1 and run.outcome.done else ""
    return _when_evaluated(run, step) or f"after {numbers.plural(step, 'rollout')}"


def _when_evaluated(run: ShownRun, step: int) -> str:
    """Empty for after all that is done."""
    done = run.outcome.done
    return "" if step == done else f"after {step:,} of {numbers.plural(done, 'rollout')}"


def _paired_change(run: ShownRun, first: int, last: int) -> Interval | None:
    """Of the same prompts and noise; None where samples were not written down."""
    if [evaluation.step for evaluation in run.files.evaluations] != [first, last]:
        return None
    before, after = run.files.evaluations
    return paired_changes(before.samples, after.samples).get("reward")


def _is_clear(change: Interval) -> bool:
    """Whether 0 lies outside the interval; never where there is none."""
    return abs(change.mean) > change.half_width


def _direction(change: Interval | None) -> str:
    if change is None or not _is_clear(change):
        return "same"
    return "better" if change.mean > 0 else "worse"


def _sentence(run: RunFiles, num_evaluations: int, gain: float, change: Interval | None) -> str:
    if num_evaluations == 1:
        since = " since its evaluation changed" if run.evaluation_changes else ""
        return f"Evaluated once{since}, so there is no change to speak of yet."
    if not math.isfinite(gain):
        return "The reward is not a number."
    if change is None:
        return "Samples were not written down, so how sure this is cannot be said."
    over = f"over the same {numbers.plural(change.num_prompts, 'prompt')} and noise"
    if math.isnan(change.half_width):
        return f"Measured {over}."
    if not _is_clear(change):
        return f"Within what chance would do {over} ({numbers.PER_CENT_95})."
    direction = "Higher" if gain > 0 else "Lower"
    return f"{direction} by more than chance would do {over} ({numbers.PER_CENT_95})."


def _plus_minus(half: float) -> str:
    return "" if math.isnan(half) else f"± {numbers.reward(half)}"


def _training(run: ShownRun) -> str:
    means = [
        row.metrics["rollout/reward_mean"]
        for row in run.files.of_kind("rollout")
        if math.isfinite(row.metrics.get("rollout/reward_mean", math.nan))
    ]
    tail = means[-max(1, len(means) // 10) :]
    return numbers.reward(math.fsum(tail) / len(tail)) if tail else ""


def _when(run: ShownRun) -> str:
    began, ended = run.outcome.began, run.outcome.ended
    if began is None or ended is None:
        return ""
    if began.date() == ended.date():
        return f"{began:%d %B %Y, %H:%M} to {ended:%H:%M}"
    return f"{began:%d %B %Y, %H:%M} to {ended:%d %B %Y, %H:%M}"
