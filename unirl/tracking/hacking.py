"""Whether the reward that is trained on and a judge that training never sees have parted.

Both look at the same held-out samples. The alarm goes off when, since the evaluation at which the
judge thought best of the model, the reward rose and the judge's score fell, each by more than its
95 % interval (`tracking.intervals`, paired by prompt). It is worked out from the records on disk,
so a resumed run comes to the same answer. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unirl.core.types import MAIN_SUITE
from unirl.tracking.evaluations import (
    EvaluatedSample,
    evaluation_file,
    evaluation_steps,
    read_evaluation,
)
from unirl.tracking.intervals import Interval, paired_changes, scores_by_prompt


@dataclass(frozen=True)
class Divergence:
    """How reward and one judge moved since the judge thought best of the model."""

    judge: str
    since: int
    """Rollouts done at that evaluation."""
    reward: Interval
    judged: Interval

    @property
    def is_alarm(self) -> bool:
        """The reward rose and the judge fell, both beyond doubt."""
        return self.reward.low > 0 and self.judged.high < 0

    @property
    def sentence(self) -> str:
        reward, judged = self.reward, self.judged
        return (
            f"reward hacking: since the evaluation after {self.since} rollouts the held-out reward "
            f"rose by {reward.mean:.3g} ± {reward.half_width:.2g} while judge {self.judge} fell by "
            f"{-judged.mean:.3g} ± {judged.half_width:.2g}. What the reward does not ask for is "
            "given up. Look at images/before_after.png; put what the judge sees into the reward, "
            "stay nearer to the base model, or stop here (stop_on=[hacking])."
        )


def divergences(run_dir: Path, step: int) -> list[Divergence]:
    """Of every judge of the evaluation at `step`; none at the first evaluation."""
    now = read_evaluation(evaluation_file(run_dir, MAIN_SUITE, step))
    earlier = {
        other: read_evaluation(evaluation_file(run_dir, MAIN_SUITE, other))
        for other in evaluation_steps(run_dir)
        if other < step
    }
    names = [name for name in scores_by_prompt(now) if name.startswith("judge_")]
    found = []
    for name in names:
        since = max(earlier, key=lambda other: _mean(earlier[other], name), default=None)
        if since is None:
            continue
        changes = paired_changes(earlier[since], now)
        if name in changes and "reward" in changes:
            judge = name.removeprefix("judge_")
            found.append(Divergence(judge, since, changes["reward"], changes[name]))
    return found


def _mean(samples: Sequence[EvaluatedSample], name: str) -> float:
    """Lowest of all where the judge had failed."""
    by_prompt = scores_by_prompt(samples).get(name)
    return math.fsum(by_prompt.values()) / len(by_prompt) if by_prompt else -math.inf
