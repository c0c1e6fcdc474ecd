"""The time left knows that evaluations and saves come in between, and when a run was resumed."""

from __future__ import annotations

import pytest

from unirl.tracking.time_left import TimeLeft
from unirl.tracking.tracker import Row


def every(interval: int):
    return lambda done: interval > 0 and done % interval == 0


def window(rollout: int, total: float, **others: float) -> Row:
    seconds = {"total": total, **others}
    return Row("rollout", rollout, 1, {f"perf/{k}_seconds": v for k, v in seconds.items()})


def evaluation(done: int) -> Row:
    return Row("eval", done, 1, {})


def test_nothing_is_known_before_the_first_window() -> None:
    left = TimeLeft(10, 0, every(5), every(0))
    assert left.seconds() is None
    left.add(evaluation(0))
    assert left.seconds() is None


def test_rollouts_evaluations_and_saves_have_means_of_their_own() -> None:
    left = TimeLeft(10, 0, every(5), every(5))
    left.add(evaluation(0))
    left.add(window(0, 2.0, evaluate=30.0))
    # 9 rollouts, and the evaluations after 5 and 10.
    assert left.seconds() == pytest.approx(9 * 2 + 2 * 30)
    for rollout in range(1, 5):
        left.add(window(rollout, 2.0))
    assert left.seconds() == pytest.approx(5 * 2 + 2 * 30)
    left.add(evaluation(5))
    assert left.seconds() == pytest.approx(5 * 2 + 1 * 30)
    left.add(window(5, 2.0, evaluate=40.0, save=6.0))
    # The mean of two evaluations, and a save with the last one.
    assert left.seconds() == pytest.approx(4 * 2 + 35 + 6)
    for rollout in range(6, 10):
        left.add(window(rollout, 2.0))
    assert left.seconds() == pytest.approx(35 + 6)
    left.add(evaluation(10))
    assert left.seconds() == pytest.approx(6)


def test_a_window_of_several_rollouts_counts_all_of_them() -> None:
    left = TimeLeft(12, 0, every(0), every(0))
    left.add(window(3, 8.0))
    assert left.seconds() == pytest.approx(8 * 2)


def test_a_resumed_run_is_judged_by_itself_and_the_doctor_looks_once() -> None:
    left = TimeLeft(100, 90, every(0), every(0))
    left.add(window(90, 13.0, doctor=10.0))
    assert left.seconds() == pytest.approx(9 * 3)
