"""Evaluation on held-out prompts with fixed noise, through the same phases as training."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unirl.config.schema import RunConfig
from unirl.core.types import PromptBatch, PromptRecord, Rewards, Rollout
from unirl.distributed.sharding import join_samples
from unirl.residency.policy import Role
from unirl.tracking.files import replacing
from unirl.tracking.media import save_before_after, save_grid
from unirl.trainer.phases import Phases
from unirl.trainer.requests import RequestFactory
from unirl.trainer.roles import GalleryRole


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
        gallery: GalleryRole,
        should_stop: Callable[[], bool],
    ) -> None:
        self._config = config
        self._phases = phases
        self._requests = requests
        self._records = records[: config.eval_num_prompts]
        self._gallery = gallery
        self._should_stop = should_stop

    def run(self, step: int, sync_weights: bool) -> Evaluation | None:
        """Evaluate after `step` rollouts; None when the run was asked to stop meanwhile.

        With a sync the engine sleeps after each chunk and gets the adapter again with the next;
        without one it stays awake through all chunks, since an engine may forget on sleep.
        """
        parks = self._phases.residency.parkable(Role.ROLLOUT)
        keep_awake = not (parks and sync_weights)
        averages = _Averages()
        shown: list[Tensor] = []
        try:
            for chunk in _chunks(self._records, self._config.eval_chunk_prompts):
                if self._should_stop():
                    break
                shown.append(self._run_chunk(chunk, averages, sync_weights, keep_awake))
        except BaseException as error:
            self._phases.sleep_after_failure(error)
            raise
        self._phases.residency.set(Role.ROLLOUT, on_device=False)
        if len(shown) * self._config.eval_chunk_prompts < len(self._records):
            return None
        pictures = self._phases.ranks.on_main(
            lambda: self._gallery.save(step, shown, self._records)
        )
        return Evaluation(averages.metrics(), pictures)

    def _run_chunk(
        self,
        chunk: tuple[PromptRecord, ...],
        averages: _Averages,
        sync_weights: bool,
        keep_awake: bool,
    ) -> Tensor:
        request = self._requests.evaluation(PromptBatch(chunk))
        rollout = self._phases.generate(request, sync_weights=sync_weights, keep_awake=keep_awake)
        kept = [Role.ROLLOUT] if keep_awake else []
        rewards = self._phases.score(request, rollout, preserve=kept)
        averages.add(rewards, self._phases.judge(request, rollout))
        return self._first_of_each_prompt(rollout, len(chunk))

    def _first_of_each_prompt(self, rollout: Rollout, num_prompts: int) -> Tensor:
        """[P, 3, H, W] one picture of each prompt that the gallery can show, of all ranks."""
        own = film_strips(rollout.images[:: rollout.request.samples_per_prompt])
        num_shown = min(num_prompts, self._config.logging.media_max_items)
        ranks = self._phases.ranks
        turns = -(-num_shown // ranks.world_size)
        return join_samples(ranks.gather(own[:turns]), num_shown)


class _Averages:
    """Means over all chunks."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, int] = defaultdict(int)

    def add(self, rewards: Rewards, judged: Mapping[str, Tensor]) -> None:
        self._add("eval/reward_mean", rewards.total[rewards.valid])
        for name, scores in rewards.components.items():
            self._add(f"eval/{name}_mean", scores[rewards.valid])
        for name, scores in judged.items():
            self._add(f"eval/judge_{name}_mean", scores)

    def _add(self, name: str, values: Tensor) -> None:
        self._sums[name] += float(values.double().sum())
        self._counts[name] += len(values)

    def metrics(self) -> dict[str, float]:
        means = {name: total / self._counts[name] for name, total in self._sums.items()}
        return {**means, "eval/num_samples": float(self._counts["eval/reward_mean"])}


class Gallery:
    """Grids of evaluation images, and the first evaluation beside the latest."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self._folder = folder
        self._num_images = config.logging.media_max_items
        self._scale = config.logging.media_scale

    def save(
        self, step: int, shown: Sequence[Tensor], records: Sequence[PromptRecord]
    ) -> list[Path]:
        """Write this evaluation's grid, and before_after.png from the second evaluation on.

        shown: [chunk, 3, H, W] uint8 tensors, one image a prompt.
        """
        images = torch.cat(list(shown))[: self._num_images].permute(0, 2, 3, 1).numpy()
        captions = [record.text for record in records[: len(images)]]
        self._folder.mkdir(parents=True, exist_ok=True)
        grid = self._folder / f"eval-{step:06d}.png"
        save_grid(images, captions, grid, self._scale, columns=math.isqrt(len(images) - 1) + 1)
        first_file = self._folder / "first_evaluation.npz"
        if not first_file.exists():
            with replacing(first_file) as temporary:
                np.savez_compressed(temporary, images=images)
            return [grid]
        pair = self._folder / "before_after.png"
        with np.load(first_file) as saved:
            first = saved["images"]
        count = min(len(first), len(images))  # a resumed run may show another number
        save_before_after(first[:count], images[:count], captions[:count], pair, self._scale)
        return [grid, pair]


def film_strips(images: Tensor) -> Tensor:
    """[B, 3, H, W] as they are; of videos [B, F, 3, H, W] the first, the middle and the last frame
    side by side, [B, 3, H, 3 W], or fewer where there are fewer."""
    if images.ndim == 4:
        return images
    last = images.shape[1] - 1
    return torch.cat([images[:, frame] for frame in sorted({0, last // 2, last})], dim=-1)


def _chunks(records: Sequence[PromptRecord], size: int) -> list[tuple[PromptRecord, ...]]:
    return [tuple(records[start : start + size]) for start in range(0, len(records), size)]
