"""The scorer contract: images and their prompt records in, one number per image out.

    class Brightness(Scorer):
        def score(self, images, records):
            return images.float().mean(dim=(1, 2, 3)) / 255

A recipe names it by path: `reward: {scorers: {bright: {path: my_pkg.rewards:Brightness}}}`.
Of a video such a scorer is asked about each frame, and the mean counts; one that looks at motion
sets `takes_videos = True` and is given whole videos [B, F, 3, H, W] instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from unirl.core.components import Component
from unirl.core.types import PromptRecord


class Scorer(ABC):
    """Scores images, or videos. Constructor arguments come from the recipe's `args`."""

    takes_videos: ClassVar[bool] = False
    """Images come as [B, F, 3, H, W], F = 1 from a model of images. Otherwise each frame of a video
    is an image of its own, B of them in all, with its video's record."""

    @abstractmethod
    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> Sequence[float] | Tensor:
        """One finite number per image or video, for images [B, 3, H, W] uint8 on the CPU.

        Raise to report a failure; never return a stand-in value for one.
        """

    def components(self) -> Sequence[Component]:
        """What the scorer holds on the device, moved when the reward role is parked."""
        return ()

    def required_metadata(self) -> Sequence[str]:
        """Metadata fields every prompt record must have; checked before the run starts."""
        return ()


class DifferentiableScorer(Scorer):
    """A scorer that can also tell how each pixel moves its score (DRaFT, arXiv:2309.17400).

    class Brightness(DifferentiableScorer):
        def score_differentiable(self, images, records):
            return images.mean(dim=(1, 2, 3))
    """

    @abstractmethod
    def score_differentiable(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        """[B] float32 scores with a gradient to images [B, 3, H, W] float32 in [0, 1].

        Images may be on any device; the scores are on the same one. The network's own weights get
        no gradient. Float32 also inside the caller's autocast.
        """

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        """`score_differentiable` of the same pixels without the gradient."""
        with torch.no_grad():
            return self.score_differentiable(images.float() / 255, records)
