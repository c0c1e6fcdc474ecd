"""The algorithm contract: scored rollouts become rows, one loss term each.

The train stack knows only rows: it splits, slices, weighs and steps. GRPO's rows are transitions;
another algorithm's may be re-noised samples or pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from torch import Tensor

from unirl.core.capabilities import AlgorithmCapabilities
from unirl.core.types import ScoredRollout
from unirl.models.base import DiffusionModel


class Rows(Protocol):
    """R loss terms of N samples; a value, selected by row."""

    @property
    def sample_index(self) -> Tensor:
        """[R] int64: the sample each row belongs to, in 0..N-1."""
        ...

    def __len__(self) -> int: ...

    def select(self, index: Tensor) -> Self: ...


R = TypeVar("R", bound=Rows)


@dataclass(frozen=True)
class RowLosses:
    """The loss terms of a slice of rows."""

    loss: Tensor
    """[r] float32, with gradient."""
    details: Mapping[str, Tensor]
    """[r] float32 each, detached; `Algorithm.metrics` turns them into numbers."""


class Algorithm(ABC, Generic[R]):
    """A loss on scored rollouts."""

    capabilities: AlgorithmCapabilities

    @abstractmethod
    def rows(self, scored: Sequence[ScoredRollout]) -> R:
        """All loss terms of this rank's samples of one window, at least one per sample.

        `sample_index` counts this rank's samples through the window. The train stack leaves out
        the rows of samples that are not valid.
        """

    @abstractmethod
    def anchor(
        self, model: DiffusionModel, rows: R, slices: Sequence[Tensor]
    ) -> tuple[R, Mapping[str, float]]:
        """Rows with everything that is fixed before the first update, and metrics of it.

        `slices` are the index tensors the update loop will use: recomputing in the same slices
        makes the first ratio exactly 1.
        """

    @abstractmethod
    def loss(self, model: DiffusionModel, rows: R) -> RowLosses:
        """The loss terms of a slice of rows."""

    @abstractmethod
    def metrics(self, details: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Metrics of one update from the details of all its rows, joined."""
