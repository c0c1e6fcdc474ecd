"""The roles as the loop sees them. A run has real ones, a plan has ones that only take notes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from unirl.core.types import (
    Rewards,
    Rollout,
    RolloutRequest,
    ScoredRollout,
    UpdateStats,
)
from unirl.residency.transition import Transition
from unirl.tracking.hacking import Divergence
from unirl.tracking.tracker import Panel
from unirl.trainer.archive import EvaluatedSuite

AroundStep = Callable[[], AbstractContextManager[None]]
"""Entered around each optimizer step."""


class TrainRole(Protocol):
    """`train.stack.TrainStack`."""

    @property
    def weight_version(self) -> int: ...

    def update(
        self, scored: Sequence[ScoredRollout], around_step: AroundStep
    ) -> list[UpdateStats]: ...


class RolloutRole(Protocol):
    """`rollout.engine.RolloutEngine`."""

    def generate(self, request: RolloutRequest) -> Rollout: ...


class RewardRole(Protocol):
    """`reward.service.RewardService`."""

    def score(self, rollout: Rollout) -> Rewards: ...

    def judge(self, rollout: Rollout) -> Mapping[str, Tensor]: ...

    def score_suite(self, rollout: Rollout, suite: str) -> Rewards: ...


class SaveRole(Protocol):
    """`trainer.checkpoints.Checkpoints`."""

    @property
    def read_the_device(self) -> bool: ...

    def is_due(self, rollouts_done: int) -> bool: ...

    def evaluated(self, rollouts_done: int, metrics: Mapping[str, float]) -> None: ...

    def save(self, rollouts_done: int) -> Path: ...


class ArchiveRole(Protocol):
    """`trainer.archive.EvaluationArchive`."""

    def save(self, step: int, suites: Sequence[EvaluatedSuite]) -> list[Panel]: ...

    def divergences(self, step: int) -> list[Divergence]: ...


class MoveRecord(Protocol):
    """`residency.trace.TransitionLog`."""

    def at(self, rollout: int, during: str) -> None: ...

    def record(self, transition: Transition) -> None: ...

    def phase_ended(self, name: str, seconds: float) -> None: ...

    def take_metrics(self) -> dict[str, float]: ...
