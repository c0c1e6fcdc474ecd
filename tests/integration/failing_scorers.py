"""Scorers as users write them, most of them wrong in one way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from unirl.core.types import PromptRecord
from unirl.reward.scorer import Scorer


class Brightness(Scorer):
    """A sound one: mean brightness in [0, 1], times `scale`."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        return self._scale * images.float().mean(dim=(1, 2, 3)) / 255


class NotANumber(Scorer):
    """NaN for the second image."""

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> list[float]:
        return [float("nan") if index == 1 else 0.5 for index in range(len(records))]


class OneForAll(Scorer):
    """One number for all images."""

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> list[float]:
        return [0.5]


class OneColumn(Scorer):
    """[B, 1] instead of [B]."""

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        return torch.zeros(len(records), 1)


class FailsAfter(Scorer):
    """Brightness for some calls; then there is an outage."""

    def __init__(self, num_calls: int) -> None:
        self._num_calls = num_calls

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        self._num_calls -= 1
        if self._num_calls < 0:
            raise TimeoutError("no answer")
        return images.float().mean(dim=(1, 2, 3)) / 255


class Raises(Scorer):
    """An error in every call."""

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> list[float]:
        raise ValueError("the judge is asleep")


class Exits(Scorer):
    """As a library that thinks it is a program."""

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> list[float]:
        raise SystemExit(7)


class FailsOnOnePrompt(Scorer):
    """Brightness, but an error for the prompt whose text is metadata `bad`."""

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        if any(record.metadata["text"] == "111" for record in records):
            raise ValueError("cannot read 111")
        return images.float().mean(dim=(1, 2, 3)) / 255


class FailsEverySecondTime(Scorer):
    """Brightness; each first attempt fails."""

    def __init__(self) -> None:
        self._num_calls = 0

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        self._num_calls += 1
        if self._num_calls % 2:
            raise TimeoutError("no answer")
        return images.float().mean(dim=(1, 2, 3)) / 255


class NeedsAFile(Scorer):
    """Reads a file when it is built."""

    def __init__(self, path: str) -> None:
        self._text = Path(path).read_text()

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> list[float]:
        return [0.0] * len(records)


class NotAScorer:
    """Has `score`, but is no `Scorer`."""

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> list[float]:
        return [0.0] * len(records)


class PaintsOver(Scorer):
    """Writes into the images it is given."""

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> list[float]:
        images.zero_()
        return [float(index) for index in range(len(records))]
