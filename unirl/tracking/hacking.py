"""Whether the reward that is trained on and what training never sees have parted.

The proxy is the reward on data.eval. Watched are judges of the same samples, and scorers of further
suites, which look at prompts of their own (`config.suites.watched_scores` says which). The alarm
goes off when, since the evaluation at which one of them thought best of the model, the held-out
reward rose and its score fell, each by more than its 95 % interval (`tracking.intervals`, paired by
prompt). It is worked out from the records on disk, so a resumed run comes to the same answer.
Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unirl.core.types import MAIN_SUITE
from unirl.tracking.evaluations import (
    EvaluatedSample,
    evaluated_suites,
    evaluation_file,
    evaluation_steps,
    read_evaluation,
)
from unirl.tracking.intervals import (
    Interval,
    metric_prefix,
    paired_changes,
    scores_by_prompt,
)


@dataclass(frozen=True)
class Divergence:
    """How the held-out reward and one watched score moved since that score was highest."""

    suite: str
    score: str
    """A judge of the main suite or a scorer of another one."""
    since: int
    """Rollouts done at that evaluation."""
    reward: Interval
    watched: Interval

    @property
    def is_alarm(self) -> bool:
        """The reward rose and the score fell, both beyond doubt."""
        return self.reward.low > 0 and self.watched.high < 0

    @property
    def metric(self) -> str:
        return f"{metric_prefix(self.suite)}/hacking_alarm_{self.score}"

    @property
    def sentence(self) -> str:
        reward, watched = self.reward, self.watched
        is_judge = self.suite == MAIN_SUITE
        name = f"judge {self.score}" if is_judge else f"{self.score} of suite {self.suite}"
        return (
            f"reward hacking: since the evaluation after {self.since} rollouts the held-out reward "
            f"rose by {reward.mean:.3g} ± {reward.half_width:.2g} while {name} fell by "
            f"{-watched.mean:.3g} ± {watched.half_width:.2g}. What the reward does not ask for is "
            "given up. Look at images/before_after.png; put what fell into the reward, "
            "stay nearer to the base model, or stop here (stop_on=[hacking])."
        )


def divergences(run_dir: Path, step: int, watched: Mapping[str, Sequence[str]]) -> list[Divergence]:
    """Of the watched scores of each suite in the evaluation at `step`; none at the first one."""
    suites = [suite for suite in evaluated_suites(run_dir, step) if watched.get(suite)]
    return [found for suite in suites for found in _of_suite(run_dir, suite, step, watched[suite])]


def _of_suite(run_dir: Path, suite: str, step: int, watched: Sequence[str]) -> Iterator[Divergence]:
    now = read_evaluation(evaluation_file(run_dir, suite, step))
    earlier = {
        other: read_evaluation(evaluation_file(run_dir, suite, other))
        for other in evaluation_steps(run_dir, suite)
        if other < step
    }
    if not earlier:
        return
    for score in watched:
        name = f"judge_{score}" if suite == MAIN_SUITE else score
        since = max(earlier, key=lambda other: _mean(earlier[other], name))
        changes, rewards = paired_changes(earlier[since], now), _main_changes(run_dir, since, step)
        if name in changes and "reward" in rewards:
            yield Divergence(suite, score, since, rewards["reward"], changes[name])


def _main_changes(run_dir: Path, first: int, last: int) -> dict[str, Interval]:
    """Of the main suite; none where one of its evaluations is not there."""
    files = [evaluation_file(run_dir, MAIN_SUITE, step) for step in (first, last)]
    if not all(file.exists() for file in files):
        return {}
    before, after = map(read_evaluation, files)
    return paired_changes(before, after)


def _mean(samples: Sequence[EvaluatedSample], name: str) -> float:
    """Lowest of all where it had failed."""
    by_prompt = scores_by_prompt(samples).get(name)
    return math.fsum(by_prompt.values()) / len(by_prompt) if by_prompt else -math.inf
