"""Train roles that look before they train: when they look, and that they pass everything on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from unirl.core.types import ScoredRollout, UpdateStats
from unirl.trainer.clock import NoMeter, PhaseClock
from unirl.trainer.examined import ExaminedFirst, OnlyExamined
from unirl.trainer.roles import AroundStep

WINDOWS: Any = (["first"], ["second"], ["third"])
"""Stand-ins for rollouts."""


class Stack:
    """Notes what it is asked for."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen
        self.weight_version = 0

    def update(self, scored: Sequence[ScoredRollout], around_step: AroundStep) -> list[UpdateStats]:
        self.seen.append(("trained", scored, around_step))
        self.weight_version += 1
        return [UpdateStats({"loss": float(self.weight_version)})]


def test_only_the_first_window_is_examined_and_before_it_is_trained_on() -> None:
    seen: list[Any] = []
    stack = Stack(seen)
    clock = PhaseClock(NoMeter())
    role = ExaminedFirst(stack, lambda scored: seen.append(("examined", scored)), clock)
    updates = [role.update(window, nullcontext) for window in WINDOWS]
    trained = [("trained", window, nullcontext) for window in WINDOWS]
    assert seen == [("examined", WINDOWS[0]), *trained]
    assert updates == [[UpdateStats({"loss": number})] for number in (1.0, 2.0, 3.0)]
    assert role.weight_version == stack.weight_version == 3
    assert clock.take_metrics().keys() == {"perf/doctor_seconds"}


def test_a_failed_look_ends_the_window_before_a_step() -> None:
    def fail(scored: Sequence[ScoredRollout]) -> None:
        raise RuntimeError("looked too closely")

    stack = Stack([])
    with pytest.raises(RuntimeError, match="looked too closely"):
        ExaminedFirst(stack, fail, PhaseClock(NoMeter())).update(WINDOWS[0], nullcontext)
    assert stack.weight_version == 0


def test_a_role_that_only_looks_takes_no_step() -> None:
    seen: list[Any] = []
    stack = Stack(seen)
    role = OnlyExamined(stack, lambda scored: seen.append(("examined", scored)))
    (stats,) = role.update(WINDOWS[0], nullcontext)
    assert seen == [("examined", WINDOWS[0])]
    assert stats.skipped is not None
    assert role.weight_version == 0
