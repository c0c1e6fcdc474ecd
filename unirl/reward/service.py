"""The reward role: runs the scorers, weighs their scores, and applies the failure policy."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unirl.config.schema import RewardConfig
from unirl.core.components import Component, Movable
from unirl.core.errors import ConfigError, DataError, RewardError
from unirl.core.types import MAIN_SUITE, PromptRecord, Rewards, Rollout
from unirl.memory.hostmem import HostArena
from unirl.memory.movers import RoleWeights
from unirl.reward.frames import question
from unirl.reward.scorer import DifferentiableScorer, Scorer

logger = logging.getLogger("unirl.reward")

LONGEST_WAIT_SECONDS = 60.0
"""Between two attempts: a run that is asked to stop finishes the phase it is in first."""


@dataclass(frozen=True)
class WeightedScorer:
    scorer: Scorer
    weight: float


class RewardService:
    """Scores rollouts with weighted scorers, and evaluation samples also with judges.

    Judges, and the scorers of evaluation suites, are such that training never sees; their failure
    costs their metric, not the run.
    """

    def __init__(
        self,
        scorers: Mapping[str, WeightedScorer],
        judges: Mapping[str, Scorer],
        config: RewardConfig,
        host: HostArena,
        suites: Mapping[str, Mapping[str, WeightedScorer]] | None = None,
    ) -> None:
        self._suites = dict(suites or {})
        self._scorers = dict(scorers)
        self._judges = dict(judges)
        self._config = config
        named = {**{name: w.scorer for name, w in scorers.items()}, **judges}
        for suite, own in self._suites.items():
            named |= {f"{suite}.{name}": weighted.scorer for name, weighted in own.items()}
        self.components: Sequence[Component] = [
            part for name, scorer in named.items() for part in scorer_components(name, scorer)
        ]
        """What the scorers hold on the device."""
        self._weights = RoleWeights(self.components, host)

    @property
    def parts(self) -> Sequence[Movable]:
        """What the residency planner moves."""
        return self._weights.parts

    def check_records(
        self, records: Sequence[PromptRecord], key: str, suite: str = MAIN_SUITE
    ) -> None:
        """Raise DataError when a record lacks metadata that a scorer of the suite compares with."""
        if suite == MAIN_SUITE:
            named = {**{n: w.scorer for n, w in self._scorers.items()}, **self._judges}
        else:
            named = {n: w.scorer for n, w in self._suites[suite].items()}
        for name, scorer in named.items():
            for field in scorer.required_metadata():
                for record in records:
                    if record.metadata.get(field) in (None, ""):
                        has = "has empty" if field in record.metadata else "lacks"
                        raise DataError(
                            f"scorer {name!r} compares images with metadata.{field}, which prompt "
                            f"{record.text!r} {has}. Add it to the records of {key}, or remove "
                            f"the scorer from reward.scorers, eval_rewards or its suite."
                        )

    def score(self, rollout: Rollout) -> Rewards:
        """Rewards of all B samples.

        Raises RewardError naming the scorer when it fails for good under the failure policy.
        """
        self._weights.require_resident("the reward service", "score")
        records = rollout.request.sample_records
        components, valid = {}, torch.ones(len(records), dtype=torch.bool)
        for name, weighted in self._scorers.items():
            scores = self._attempt(name, weighted.scorer, rollout, records)
            valid &= scores.isfinite()
            components[name] = scores
        valid = valid.view(-1, rollout.request.samples_per_prompt).all(dim=1)
        valid = valid.repeat_interleave(rollout.request.samples_per_prompt)
        total = torch.zeros(len(records))
        for name, weighted in self._scorers.items():
            total += weighted.weight * components[name]
        return Rewards(total, components, valid)

    def judge(self, rollout: Rollout) -> Mapping[str, Tensor]:
        """Each judge's scores [B] of evaluation samples; a judge that fails is left out, loudly."""
        self._weights.require_resident("the reward service", "judge")
        scores = {}
        for name, judge in self._judges.items():
            try:
                scores[name] = _score_checked(
                    name, judge, rollout.images, rollout.request.sample_records
                )
            except RewardError as error:
                logger.warning("judge left out of this evaluation: %s", error)
        return scores

    def score_suite(self, rollout: Rollout, suite: str) -> Rewards:
        """Scores of an evaluation suite's samples; NaN, and the samples not valid, of a scorer
        that fails, loudly."""
        self._weights.require_resident("the reward service", f"score suite {suite}")
        records = rollout.request.sample_records
        components, total = {}, torch.zeros(len(records))
        for name, weighted in self._suites[suite].items():
            try:
                scores = _score_checked(name, weighted.scorer, rollout.images, records)
            except RewardError as error:
                logger.warning("left out of this evaluation of suite %s: %s", suite, error)
                scores = torch.full((len(records),), float("nan"))
            components[name] = scores
            total += weighted.weight * scores
        return Rewards(total, components, total.isfinite())

    def require_differentiable(self) -> None:
        """Raise ConfigError naming the scorers that gradients cannot go through."""
        dead = [
            name
            for name, weighted in self._scorers.items()
            if not isinstance(weighted.scorer, DifferentiableScorer)
        ]
        if dead:
            raise ConfigError(
                f"reward.scorers: {', '.join(dead)} cannot be differentiated, but the algorithm "
                "takes the gradient of the reward. Use differentiable scorers, and move these to "
                "eval_rewards."
            )

    def differentiable(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        """[B] weighted total of images [B, 3, H, W] float32 in [0, 1], with gradient; of videos
        [B, F, 3, H, W]."""
        self._weights.require_resident("the reward service", "be differentiated")
        total = images.new_zeros(len(images))
        for weighted in self._scorers.values():
            assert isinstance(weighted.scorer, DifferentiableScorer)
            asked = question(weighted.scorer, images, records)
            scores = weighted.scorer.score_differentiable(asked.pictures, asked.records)
            total = total + weighted.weight * asked.of_samples(scores)
        return total

    def _attempt(
        self, name: str, scorer: Scorer, rollout: Rollout, records: Sequence[PromptRecord]
    ) -> Tensor:
        """[B] scores under the failure policy; NaN marks samples whose group is to be dropped."""
        match self._config.on_failure:
            case "raise":
                return _score_checked(name, scorer, rollout.images, records)
            case "retry":
                return self._retry(name, scorer, rollout, records)
            case "drop_group":
                return _score_by_group(name, scorer, rollout, records)

    def _retry(
        self, name: str, scorer: Scorer, rollout: Rollout, records: Sequence[PromptRecord]
    ) -> Tensor:
        for attempt in range(1, self._config.num_retries + 1):
            try:
                return _score_checked(name, scorer, rollout.images, records)
            except RewardError as error:
                logger.warning("%s; attempt %d of %d", error, attempt, self._config.num_retries + 1)
                longer = self._config.retry_seconds * 2 ** (attempt - 1)
                time.sleep(min(longer, LONGEST_WAIT_SECONDS))
        return _score_checked(name, scorer, rollout.images, records)


def scorer_components(name: str, scorer: Scorer) -> list[Component]:
    """The scorer's components under names of their own: two scorers may be of one class.

    Raises ConfigError when `components()` returns something else, or one name twice.
    """
    declared = scorer.components()
    what = f"scorer {name!r}: {type(scorer).__name__}.components()"
    if not isinstance(declared, Sequence) or not all(isinstance(p, Component) for p in declared):
        raise ConfigError(
            f"{what} returned {declared!r}; it must return a list of TensorComponent and "
            "RebuiltComponent, e.g. module_components('net', self.net)."
        )
    names = [part.name for part in declared]
    if len(set(names)) < len(names):
        raise ConfigError(f"{what} has one name twice: {names}. Give each a name of its own.")
    return [replace(part, name=f"reward.{name}.{part.name}") for part in declared]


def _score_checked(
    name: str, scorer: Scorer, images: Tensor, records: Sequence[PromptRecord]
) -> Tensor:
    """[B] finite float32 scores, or RewardError naming the scorer and the first bad sample."""
    untouched = images._version
    asked = question(scorer, images, records)
    count = len(asked.records)
    try:
        with torch.no_grad():
            returned = scorer.score(asked.pictures, asked.records)
        scores = torch.as_tensor(returned, dtype=torch.float32).detach().cpu()
    except (Exception, SystemExit) as error:
        logger.debug("scorer %r failed", name, exc_info=True)  # its traceback, for run.log
        raise RewardError(
            f"scorer {name!r} failed: {type(error).__name__}: {error}. "
            "Fix it, or set reward.on_failure=retry or drop_group."
        ) from error
    if images._version != untouched:
        raise RewardError(f"scorer {name!r} wrote into the images it was given; let it copy them")
    if scores.shape != (count,):
        what = "video" if scorer.takes_videos else "image"
        raise RewardError(
            f"scorer {name!r} returned scores of shape {tuple(scores.shape)} "
            f"for {count} {what}s; it must return one number per {what}"
        )
    bad = torch.nonzero(~scores.isfinite()).flatten().tolist()
    if bad:
        raise RewardError(
            f"scorer {name!r} returned {float(scores[bad[0]])} for {len(bad)} of {count} "
            f"images, first for prompt {asked.records[bad[0]].text!r}. A failure is never counted "
            "as 0; fix the scorer, or set reward.on_failure=drop_group."
        )
    return asked.of_samples(scores)


def _score_by_group(
    name: str, scorer: Scorer, rollout: Rollout, records: Sequence[PromptRecord]
) -> Tensor:
    """Like _score_checked, but a failure costs the prompt group it happens in."""
    try:
        return _score_checked(name, scorer, rollout.images, records)
    except RewardError as error:
        logger.warning("%s Scoring group by group.", error)
    size = rollout.request.samples_per_prompt
    groups = []
    for start in range(0, len(records), size):
        rows = slice(start, start + size)
        try:
            groups.append(_score_checked(name, scorer, rollout.images[rows], records[rows]))
        except RewardError as error:
            logger.warning("group dropped: %s", error)
            groups.append(torch.full((size,), float("nan")))
    return torch.cat(groups)
