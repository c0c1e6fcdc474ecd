"""How sure an evaluation is: intervals over prompts, of one evaluation and between two.

Samples of a prompt are alike, so they are averaged first and prompts are what is counted. The 95 %
interval of the mean over prompts is Student's t: mean ± t * s / sqrt(n). Two evaluations share
prompts and noise, so their difference is taken prompt by prompt; its interval is far narrower than
those of the two means. Imports no torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unirl.core.types import MAIN_SUITE
from unirl.tracking.evaluations import (
    EvaluatedSample,
    evaluated_suites,
    evaluation_file,
    read_evaluation,
)


@dataclass(frozen=True)
class Interval:
    """A mean over prompts and its 95 % confidence interval."""

    mean: float
    half_width: float
    """Of the interval; NaN with fewer than two prompts."""
    num_prompts: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def confidence_interval(values: Sequence[float]) -> Interval:
    """Of the mean of one value a prompt; at least one."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Interval(mean, math.nan, count)
    error = statistics.stdev(values, mean) / math.sqrt(count)
    return Interval(mean, t_quantile(count - 1) * error, count)


def scores_by_prompt(samples: Sequence[EvaluatedSample]) -> dict[str, dict[int, float]]:
    """Prompt -> mean over its samples, for `reward`, each scorer and each `judge_<name>`.

    A prompt that a scorer failed on has no value there.
    """
    values: dict[str, dict[int, list[float]]] = {}
    for sample in samples:
        for name, score in _named_scores(sample).items():
            values.setdefault(name, {}).setdefault(sample.prompt, []).append(score)
    return {
        name: {prompt: math.fsum(scores) / len(scores) for prompt, scores in by_prompt.items()}
        for name, by_prompt in values.items()
    }


def metric_prefix(suite: str) -> str:
    """Of the names of its metrics."""
    return "eval" if suite == MAIN_SUITE else f"eval/{suite}"


def changes_between(run_dir: Path, first: int, last: int) -> dict[str, Interval]:
    """Of each `eval/..._mean` that two evaluations on record have, the change of that metric."""
    changes: dict[str, Interval] = {}
    for suite in evaluated_suites(run_dir, last):
        before, after = (evaluation_file(run_dir, suite, step) for step in (first, last))
        if before.exists():
            found = paired_changes(read_evaluation(before), read_evaluation(after))
            changes |= {f"{metric_prefix(suite)}/{name}_mean": i for name, i in found.items()}
    return changes


def paired_changes(
    before: Sequence[EvaluatedSample], after: Sequence[EvaluatedSample]
) -> dict[str, Interval]:
    """Of each score, the mean change over the prompts that both evaluations have."""
    old, new = scores_by_prompt(before), scores_by_prompt(after)
    changes = {name: _differences(old[name], new[name]) for name in old if name in new}
    return {name: confidence_interval(values) for name, values in changes.items() if values}


def _differences(old: Mapping[int, float], new: Mapping[int, float]) -> list[float]:
    return [new[prompt] - old[prompt] for prompt in old if prompt in new]


def _named_scores(sample: EvaluatedSample) -> dict[str, float]:
    reward = {} if sample.reward is None else {"reward": sample.reward}
    judged = {f"judge_{name}": score for name, score in sample.judges.items()}
    return {**reward, **sample.scores, **judged}


_SMALL_T = (12.7062, 4.30265, 3.18245, 2.77645)
"""For 1 to 4 degrees of freedom, where the expansion below is not good enough."""


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, within 3e-4 (Abramowitz and Stegun 26.7.5)."""
    if degrees <= len(_SMALL_T):
        return _SMALL_T[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * degrees**4)
    )
