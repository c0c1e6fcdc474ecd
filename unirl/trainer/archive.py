"""Keeps evaluations in the run directory: lines, images, a grid, the first beside the latest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unirl.config.schema import RunConfig
from unirl.config.suites import watched_scores
from unirl.core.types import MAIN_SUITE
from unirl.tracking.evaluations import (
    EvaluatedSample,
    evaluation_steps,
    image_file,
    read_images,
    write_evaluation,
)
from unirl.tracking.hacking import Divergence, divergences
from unirl.tracking.intervals import metric_prefix
from unirl.tracking.media import save_before_after, save_grid
from unirl.tracking.tracker import Panel, Picture


@dataclass(frozen=True)
class EvaluatedSuite:
    """The samples of one prompt set with what scorers and judges said."""

    name: str
    samples: tuple[EvaluatedSample, ...]
    """By prompt, then by sample."""
    shown: Tensor
    """[P', 3, H, W] uint8, the first sample of each of the first prompts; of videos film strips."""


class EvaluationArchive:
    """Writes what a run's evaluations found."""

    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        self._run_dir = run_dir
        self._num_images = config.logging.media_max_items
        self._scale = config.logging.media_scale
        self._watched = watched_scores(config)

    def save(self, step: int, suites: Sequence[EvaluatedSuite]) -> list[Panel]:
        """Write an evaluation after `step` rollouts; returns its pictures.

        before_after.png is written from the second evaluation on. Raises UnirlError when the disk
        refuses: evaluations are part of a run like its metrics.
        """
        panels: list[Panel] = []
        for suite in suites:
            images = suite.shown[: self._num_images].permute(0, 2, 3, 1).numpy()
            write_evaluation(self._run_dir, suite.name, step, suite.samples, images)
            pictures = self._pictures(suite, step)[: len(images)]
            panels.append(Panel(f"{metric_prefix(suite.name)}/samples", step, tuple(pictures)))
            if suite.name == MAIN_SUITE:
                panels += self._sheets(step, images, pictures)
        return panels

    def _pictures(self, suite: EvaluatedSuite, step: int) -> list[Picture]:
        """One a prompt."""
        return [
            Picture(
                image_file(self._run_dir, suite.name, step, sample.prompt),
                sample.text,
                sample.reward,
            )
            for sample in suite.samples
            if sample.sample == 0
        ]

    def divergences(self, step: int) -> list[Divergence]:
        """How reward and judges moved up to this evaluation; none at the first."""
        return divergences(self._run_dir, step, self._watched)

    def _sheets(
        self, step: int, images: NDArray[np.uint8], pictures: Sequence[Picture]
    ) -> list[Panel]:
        folder = self._run_dir / "images"
        grid = folder / f"{MAIN_SUITE}-{step:06d}.png"
        columns = math.isqrt(len(images) - 1) + 1
        captions = [picture.caption for picture in pictures]
        save_grid(images, captions, grid, self._scale, columns)
        panels = [Panel("eval/grid", step, (Picture(grid),))]
        first_step = evaluation_steps(self._run_dir)[0]
        if first_step == step:
            return panels
        pair = folder / "before_after.png"
        first = read_images(self._run_dir, MAIN_SUITE, first_step, len(images))
        count = len(first)  # a resumed run may show another number
        prompts = [picture.text for picture in pictures[:count]]
        save_before_after(first, images[:count], prompts, pair, self._scale)
        return [*panels, Panel("eval/before_after", step, (Picture(pair),))]
