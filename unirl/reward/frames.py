"""What a scorer is asked about: images, whole videos, or every frame of a video as an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from unirl.core.types import PromptRecord
from unirl.reward.scorer import Scorer


@dataclass(frozen=True)
class Question:
    """Pictures for one call of a scorer, and how its answers become those of the samples."""

    pictures: Tensor
    """[N, 3, H, W], or [N, F, 3, H, W] for a scorer that takes videos."""
    records: Sequence[PromptRecord]
    """N."""
    per_sample: int
    """Pictures of one sample, which follow each other; their mean counts."""

    def of_samples(self, scores: Tensor) -> Tensor:
        """[N] -> [N / per_sample]."""
        return scores.view(-1, self.per_sample).mean(dim=1) if self.per_sample > 1 else scores


def question(scorer: Scorer, images: Tensor, records: Sequence[PromptRecord]) -> Question:
    """About samples [B, 3, H, W], of videos [B, F, 3, H, W], and their B records."""
    is_video = images.ndim == 5
    if scorer.takes_videos:
        return Question(images if is_video else images.unsqueeze(1), records, 1)
    if not is_video:
        return Question(images, records, 1)
    num_frames = images.shape[1]
    repeated = [record for record in records for _ in range(num_frames)]
    return Question(images.flatten(0, 1), repeated, num_frames)
