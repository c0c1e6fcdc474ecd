"""Which of the recorded images of a prompt was preferred, for `rollout.engine: recorded`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unirl.core.types import PromptRecord
from unirl.data.recorded import images_of
from unirl.reward.scorer import Scorer


class PreferenceScorer(Scorer):
    """1 for the first of a prompt's images, 0 for its others.

    It goes by position, not by looking: images are whole groups in the order of the records. What
    the model makes for prompts without recorded images is 0 as well, since no one has preferred it.
    """

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        sizes = [len(images_of(record)) for record in records]
        return torch.tensor(
            [float(size > 0 and place % size == 0) for place, size in enumerate(sizes)]
        )
