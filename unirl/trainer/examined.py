"""Train roles that look at what they are given: before they train on it the first time, or only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unirl.core.types import ScoredRollout, UpdateStats
from unirl.trainer.clock import PhaseClock
from unirl.trainer.roles import AroundStep, TrainRole

Examine = Callable[[Sequence[ScoredRollout]], None]
"""Looks at the rollouts of a window and changes nothing."""


class ExaminedFirst:
    """A train role whose first window is examined, on the device where it is about to be trained
    on. The look is a phase of its own, `doctor`."""

    def __init__(self, stack: TrainRole, examine: Examine, clock: PhaseClock) -> None:
        self._stack = stack
        self._examine: Examine | None = examine
        self._clock = clock

    @property
    def weight_version(self) -> int:
        return self._stack.weight_version

    def update(self, scored: Sequence[ScoredRollout], around_step: AroundStep) -> list[UpdateStats]:
        if self._examine is not None:
            examine, self._examine = self._examine, None
            with self._clock.phase("doctor"):
                examine(scored)
        return self._stack.update(scored, around_step)


class OnlyExamined:
    """A train role that examines windows and takes no step."""

    def __init__(self, stack: TrainRole, examine: Examine) -> None:
        self._stack = stack
        self._examine = examine

    @property
    def weight_version(self) -> int:
        return self._stack.weight_version

    def update(self, scored: Sequence[ScoredRollout], around_step: AroundStep) -> list[UpdateStats]:
        self._examine(scored)
        return [UpdateStats({}, "only examined")]
