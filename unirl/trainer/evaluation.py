"""Evaluation on held-out prompts with fixed noise, through the same phases as training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unirl.config.schema import RunConfig
from unirl.core.types import PromptBatch, PromptRecord, Rewards, Rollout
from unirl.distributed.sharding import join_samples
from unirl.residency.policy import Role
from unirl.tracking.evaluations import MAIN_SUITE, EvaluatedSample
from unirl.trainer.archive import EvaluatedSuite
from unirl.trainer.phases import Phases
from unirl.trainer.requests import RequestFactory
from unirl.trainer.roles import ArchiveRole


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation."""

    metrics: dict[str, float]
    pictures: list[Path]


class Evaluator:
    """Samples the evaluation prompts in chunks and averages what scorers and judges say."""

    def __init__(
        self,
        config: RunConfig,
        phases: Phases,
        requests: RequestFactory,
        records: Sequence[PromptRecord],
        archive: ArchiveRole,
        should_stop: Callable[[], bool],
    ) -> None:
        self._config = config
        self._phases = phases
        self._requests = requests
        self._records = records[: config.eval_num_prompts]
        self._archive = archive
        self._should_stop = should_stop

    def run(self, step: int, sync_weights: bool) -> Evaluation | None:
        """Evaluate after `step` rollouts; None when the run was asked to stop meanwhile.

        With a sync the engine sleeps after each chunk and gets the adapter again with the next;
        without one it stays awake through all chunks, since an engine may forget on sleep.
        """
        parks = self._phases.residency.parkable(Role.ROLLOUT)
        keep_awake = not (parks and sync_weights)
        chunks: list[_Chunk] = []
        starts = range(0, len(self._records), self._config.eval_chunk_prompts)
        try:
            for start in starts:
                if self._should_stop():
                    break
                chunks.append(self._run_chunk(start, sync_weights, keep_awake))
        except BaseException as error:
            self._phases.sleep_after_failure(error)
            raise
        self._phases.residency.set(Role.ROLLOUT, on_device=False)
        if len(chunks) < len(starts):
            return None
        suite = _joined(MAIN_SUITE, chunks)
        pictures = self._phases.ranks.on_main(lambda: self._archive.save(step, [suite]))
        return Evaluation(evaluation_metrics(suite.samples), pictures)

    def _run_chunk(self, start: int, sync_weights: bool, keep_awake: bool) -> _Chunk:
        """The prompts from `start` on; the last chunk may be smaller."""
        prompts = self._records[start : start + self._config.eval_chunk_prompts]
        request = self._requests.evaluation(PromptBatch(tuple(prompts)))
        rollout = self._phases.generate(request, sync_weights=sync_weights, keep_awake=keep_awake)
        kept = [Role.ROLLOUT] if keep_awake else []
        rewards = self._phases.score(request, rollout, preserve=kept)
        judged = self._phases.judge(request, rollout)
        return _Chunk(
            _evaluated_samples(prompts, start, rewards, judged),
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
    """What one chunk of prompts gave."""

    samples: list[EvaluatedSample]
    shown: Tensor
    """As in `EvaluatedSuite`."""


def _joined(name: str, chunks: Sequence[_Chunk]) -> EvaluatedSuite:
    samples = tuple(sample for chunk in chunks for sample in chunk.samples)
    return EvaluatedSuite(name, samples, torch.cat([chunk.shown for chunk in chunks]))


def _evaluated_samples(
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


def evaluation_metrics(samples: Sequence[EvaluatedSample]) -> dict[str, float]:
    """Means over all samples, whatever the chunks were; dropped prompts count for judges only."""
    valid = [sample for sample in samples if sample.reward is not None]
    values = {"eval/reward_mean": [s.reward for s in samples if s.reward is not None]}
    for sample in valid:
        for name, score in sample.scores.items():
            values.setdefault(f"eval/{name}_mean", []).append(score)
    for sample in samples:
        for name, score in sample.judges.items():
            values.setdefault(f"eval/judge_{name}_mean", []).append(score)
    means = {name: math.fsum(scores) / len(scores) for name, scores in values.items()}
    return {**means, "eval/num_samples": float(len(valid))}


def film_strips(images: Tensor) -> Tensor:
    """[B, 3, H, W] as they are; of videos [B, F, 3, H, W] the first, the middle and the last frame
    side by side, [B, 3, H, 3 W], or fewer where there are fewer."""
    if images.ndim == 4:
        return images
    last = images.shape[1] - 1
    return torch.cat([images[:, frame] for frame in sorted({0, last // 2, last})], dim=-1)
