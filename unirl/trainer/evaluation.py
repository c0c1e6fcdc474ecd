"""Evaluation on held-out prompts with fixed noise, through the same phases as training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.config.schema import RunConfig
from unirl.core.types import MAIN_SUITE, PromptBatch, PromptRecord, PromptSuite, Rewards, Rollout
from unirl.distributed.sharding import join_samples
from unirl.residency.policy import Role
from unirl.tracking.evaluations import EvaluatedSample
from unirl.tracking.hacking import Divergence
from unirl.tracking.intervals import confidence_interval, metric_prefix, scores_by_prompt
from unirl.tracking.tracker import Panel
from unirl.trainer.archive import EvaluatedSuite
from unirl.trainer.phases import Phases
from unirl.trainer.requests import RequestFactory
from unirl.trainer.roles import ArchiveRole

logger = logging.getLogger("unirl.trainer")


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation."""

    metrics: dict[str, float]
    panels: list[Panel]
    is_hacked: bool
    """The reward rose while a score that it does not see fell, see `tracking.hacking`."""


class Evaluator:
    """Samples the evaluation prompts in chunks and averages what scorers and judges say."""

    def __init__(
        self,
        config: RunConfig,
        phases: Phases,
        requests: RequestFactory,
        suites: Sequence[PromptSuite],
        archive: ArchiveRole,
        should_stop: Callable[[], bool],
    ) -> None:
        self._config = config
        self._phases = phases
        self._requests = requests
        self._suites = tuple(suites)
        self._archive = archive
        self._should_stop = should_stop

    def run(
        self,
        step: int,
        sync_weights: bool,
        note_progress: Callable[[int], None] = lambda num_prompts: None,
    ) -> Evaluation | None:
        """Evaluate after `step` rollouts; None when the run was asked to stop meanwhile.

        With a sync the engine sleeps after each chunk and gets the adapter again with the next;
        without one it stays awake through all chunks, since an engine may forget on sleep.
        `note_progress` is told after each chunk how many prompts are done, over all suites.
        """
        parks = self._phases.residency.parkable(Role.ROLLOUT)
        keep_awake = not (parks and sync_weights)
        chunks: list[_Chunk] = []
        num_prompts = 0
        asked = [(suite, start) for suite in self._suites for start in self._starts(suite)]
        try:
            for suite, start in asked:
                if self._should_stop():
                    break
                chunks.append(self._run_chunk(suite, start, sync_weights, keep_awake))
                num_prompts += min(self._config.eval_chunk_prompts, len(suite) - start)
                note_progress(num_prompts)
        except BaseException as error:
            self._phases.sleep_after_failure(error)
            raise
        self._phases.residency.set(Role.ROLLOUT, on_device=False)
        if len(chunks) < len(asked):
            return None
        evaluated = [_joined(suite.name, chunks) for suite in self._suites]
        metrics: dict[str, float] = {}
        for suite in evaluated:
            metrics |= evaluation_metrics(suite.name, suite.samples)
        panels, moved = self._phases.ranks.on_main(lambda: self._keep(step, evaluated))
        metrics |= {d.metric: float(d.is_alarm) for d in moved}
        return Evaluation(metrics, panels, is_hacked=_alarmed(moved))

    def is_hacked(self, step: int) -> bool:
        """What the records say of an evaluation at `step`; False where there is none."""
        found = self._phases.ranks.on_main(lambda: self._archive.divergences(step))
        return _alarmed(found)

    def _keep(
        self, step: int, evaluated: Sequence[EvaluatedSuite]
    ) -> tuple[list[Panel], list[Divergence]]:
        """Write the evaluation down, and warn where reward and judges have parted."""
        panels = self._archive.save(step, evaluated)
        moved = self._archive.divergences(step)
        for divergence in moved:
            if divergence.is_alarm:
                logger.warning("%s", divergence.sentence)
        return panels, moved

    def _starts(self, suite: PromptSuite) -> range:
        """First prompts of its chunks; the last chunk may be smaller."""
        return range(0, len(suite), self._config.eval_chunk_prompts)

    def _run_chunk(
        self, suite: PromptSuite, start: int, sync_weights: bool, keep_awake: bool
    ) -> _Chunk:
        prompts = suite.records[start : start + self._config.eval_chunk_prompts]
        request = self._requests.evaluation(PromptBatch(prompts), suite.samples_per_prompt)
        rollout = self._phases.generate(request, sync_weights=sync_weights, keep_awake=keep_awake)
        kept = [Role.ROLLOUT] if keep_awake else []
        if suite.name == MAIN_SUITE:
            rewards = self._phases.score(request, rollout, preserve=kept)
            judged = self._phases.judge(request, rollout)
        else:
            rewards = self._phases.score_suite(request, rollout, suite.name, preserve=kept)
            judged = {}
        return _Chunk(
            suite.name,
            evaluated_samples(prompts, start, rewards, judged),
            self._first_of_each_prompt(rollout, len(prompts)),
        )

    def _first_of_each_prompt(self, rollout: Rollout, num_prompts: int) -> Tensor:
        """[P, 3, H, W] one picture of each prompt that the archive can show, of all ranks."""
        own = film_strips(rollout.images[:: rollout.request.samples_per_prompt])
        num_shown = min(num_prompts, self._config.logging.media_max_items)
        ranks = self._phases.ranks
        turns = -(-num_shown // ranks.world_size)
        return join_samples(ranks.gather(own[:turns]), num_shown)


@dataclass(frozen=True)
class _Chunk:
    """What one chunk of a suite's prompts gave."""

    suite: str
    samples: list[EvaluatedSample]
    shown: Tensor
    """As in `EvaluatedSuite`."""


def _joined(suite: str, chunks: Sequence[_Chunk]) -> EvaluatedSuite:
    own = [chunk for chunk in chunks if chunk.suite == suite]
    samples = tuple(sample for chunk in own for sample in chunk.samples)
    return EvaluatedSuite(suite, samples, torch.cat([chunk.shown for chunk in own]))


def _alarmed(found: Sequence[Divergence]) -> bool:
    return any(divergence.is_alarm for divergence in found)


def evaluated_samples(
    chunk: Sequence[PromptRecord], first: int, rewards: Rewards, judged: Mapping[str, Tensor]
) -> list[EvaluatedSample]:
    """Of a chunk whose first prompt is the suite's prompt `first`."""
    num_samples = len(rewards.total) // len(chunk)
    return [
        EvaluatedSample(
            prompt=first + sample // num_samples,
            text=chunk[sample // num_samples].text,
            sample=sample % num_samples,
            reward=float(rewards.total[sample]) if rewards.valid[sample] else None,
            scores=_finite({name: s[sample] for name, s in rewards.components.items()}),
            judges=_finite({name: s[sample] for name, s in judged.items()}),
        )
        for sample in range(len(rewards.total))
    ]


def _finite(scores: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(score) for name, score in scores.items() if score.isfinite()}


def evaluation_metrics(suite: str, samples: Sequence[EvaluatedSample]) -> dict[str, float]:
    """Means over prompts with the half-width of their interval, whatever the chunks were."""
    prefix = metric_prefix(suite)
    metrics: dict[str, float] = {}
    for name, by_prompt in scores_by_prompt(samples).items():
        of_prompts = confidence_interval(list(by_prompt.values()))
        metrics[f"{prefix}/{name}_mean"] = of_prompts.mean
        if len(by_prompt) > 1:
            metrics[f"{prefix}/{name}_ci95"] = of_prompts.half_width
    rewarded = sum(sample.reward is not None for sample in samples)
    return {**metrics, f"{prefix}/num_samples": float(rewarded)}


def film_strips(images: Tensor) -> Tensor:
    """[B, 3, H, W] as they are; of videos [B, F, 3, H, W] the first, the middle and the last frame
    side by side, [B, 3, H, 3 W], or fewer where there are fewer."""
    if images.ndim == 4:
        return images
    last = images.shape[1] - 1
    return torch.cat([images[:, frame] for frame in sorted({0, last // 2, last})], dim=-1)
