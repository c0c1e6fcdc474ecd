"""The algorithm contract: scored rollouts become rows, one loss term each.

    rows(scored) -> R         what is trained on
    anchor(policy, R) -> A    R and all that is fixed before the first update
    loss(policy, A)           the loss terms of a slice of it

The train stack knows only rows: it splits, slices, weighs and steps. GRPO's rows are transitions,
NFT's are re-noised samples, DPO's are pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from torch import Tensor

from unirl.config.schema import AlgorithmConfig
from unirl.core.capabilities import AlgorithmCapabilities
from unirl.core.types import PromptRecord, ScoredRollout
from unirl.models.base import DiffusionModel

DifferentiableReward = Callable[[Tensor, Sequence[PromptRecord]], Tensor]
"""(images [B, 3, H, W] float32 in [0, 1] with gradient, B records) -> total reward [B] float32."""

BASE = "base"
"""The weights without the adapter."""


class Rows(Protocol):
    """R loss terms of N samples; a value, selected by row."""

    @property
    def sample_index(self) -> Tensor:
        """[R] int64: the sample each row belongs to, in 0..N-1."""
        ...

    def __len__(self) -> int: ...

    def select(self, index: Tensor) -> Self: ...


R = TypeVar("R", bound=Rows)
A = TypeVar("A", bound=Rows)


@dataclass(frozen=True)
class RowLosses:
    """The loss terms of a slice of rows."""

    loss: Tensor
    """[r] float32, with gradient."""
    details: Mapping[str, Tensor]
    """[r] float32 each, detached; `Algorithm.metrics` turns them into numbers."""


@dataclass(frozen=True)
class Policy:
    """The model in training, which can be seen with other weights than the present ones."""

    model: DiffusionModel
    weights: Mapping[str, Callable[[], AbstractContextManager[None]]]
    """By name, a context in which the network has these weights; no gradient may be taken there."""
    progress: float
    """Part of the run's optimizer steps that is done, in [0, 1)."""

    def using(self, name: str) -> AbstractContextManager[None]:
        """`with policy.using("base"):`"""
        return self.weights[name]()


@dataclass(frozen=True)
class ShadowRule:
    """A second set of the trained weights that follows them: shadow <- d shadow + (1 - d) trained,
    once per window in which a step was taken."""

    decay: Callable[[int], float]
    """From the number of optimizer steps taken to d."""


class Algorithm(ABC, Generic[R, A]):
    """A loss on scored rollouts. Built from its keys and a way to differentiate the reward."""

    capabilities: AlgorithmCapabilities

    @abstractmethod
    def __init__(self, config: AlgorithmConfig, reward: DifferentiableReward) -> None:
        """`reward` works only with scorers that can be differentiated."""

    def kept_steps(self, num_inference_steps: int, rollout_id: int, seed: int) -> tuple[int, ...]:
        """Steps before which a rollout keeps its latents for `rows`, ascending."""
        return ()

    def shadows(self) -> Mapping[str, ShadowRule]:
        """Shadow weights, by the name under which `Policy.using` has them."""
        return {}

    def sampling_weights(self) -> str | None:
        """The shadow that rollouts and evaluations sample with; None: the trained weights."""
        return None

    def teachers(self) -> Mapping[str, str]:
        """Frozen weights like the trained ones: a name for `Policy.using` -> their file."""
        return {}

    def check_prompts(self, records: Sequence[PromptRecord], key: str) -> None:
        """Raise DataError naming the config key for a prompt that cannot be trained on.

        Called once with all training prompts before a run starts.
        """
        return

    @abstractmethod
    def rows(self, scored: Sequence[ScoredRollout]) -> R:
        """All loss terms of this rank's samples of one window.

        `sample_index` counts this rank's samples through the window. The train stack leaves out
        the rows of samples that are not trained, and those of sample_index -1. There must be some
        row in any case: it lets this rank take part in the network calls of the others.
        """

    @abstractmethod
    def anchor(
        self, policy: Policy, rows: R, slices: Sequence[Tensor]
    ) -> tuple[A, Mapping[str, float]]:
        """Rows with everything that is fixed before the first update, and metrics of it.

        `slices` are the index tensors the update loop will use: recomputing in the same slices
        makes the first ratio exactly 1. Called without gradients.
        """

    @abstractmethod
    def loss(self, policy: Policy, rows: A) -> RowLosses:
        """The loss terms of a slice of rows. Other weights are used before gradients begin."""

    @abstractmethod
    def metrics(self, details: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Metrics of one update from the details of all its rows, joined."""
