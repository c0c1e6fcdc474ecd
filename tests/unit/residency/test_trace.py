"""The record of moves on disk and in metrics."""

from __future__ import annotations

import json

import pytest
from builders import transition_log

from unirl.core.components import Moved
from unirl.residency.directory import State
from unirl.residency.policy import Role
from unirl.residency.transition import ComponentMove, Transition
from unirl.tracking.metrics import describe


def transition(seq: int, role: Role, to_device: bool, *moved: Moved) -> Transition:
    away, here = State.PARKED, State.RESIDENT
    moves = tuple(
        ComponentMove(
            component=f"{role.value}.part{number}",
            source=away if to_device else here,
            target=here if to_device else away,
            moved=one,
            seconds=0.25,
            version="3",
            device_bytes=1000,
            host_bytes=2000,
        )
        for number, one in enumerate(moved)
    )
    return Transition(seq, role, to_device, "enter train", moves, seconds=0.5)


def test_a_line_holds_what_moved_where_why_and_how_much(tmp_path):
    log = transition_log(tmp_path)
    log.at(3, "window")
    log.record(transition(1, Role.REWARD, False, Moved(100, 28), Moved(5)))
    first, second = (tmp_path / "transitions.jsonl").read_text().splitlines()  # before close
    log.close()
    assert json.loads(first) == {
        "seq": 1,
        "transition": 1,
        "rollout": 3,
        "during": "window",
        "role": "reward",
        "move": "offload",
        "cause": "enter train",
        "rule": "release first",
        "component": "reward.part0",
        "from": "resident",
        "to": "parked",
        "version": "3",
        "moved_bytes": 100,
        "dropped_bytes": 28,
        "seconds": 0.25,
        "device_bytes": 1000,
        "host_bytes": 2000,
    }
    assert (json.loads(second)["seq"], json.loads(second)["component"]) == (2, "reward.part1")


def test_a_transition_of_nothing_still_has_a_line(tmp_path):
    log = transition_log(tmp_path)
    log.record(transition(1, Role.ROLLOUT, True))
    log.close()
    (line,) = map(json.loads, (tmp_path / "transitions.jsonl").read_text().splitlines())
    assert (line["role"], line["move"], line["component"]) == ("rollout", "onload", None)
    assert line["moved_bytes"] == line["dropped_bytes"] == 0


def test_metrics_count_since_they_were_last_taken(tmp_path):
    log = transition_log(tmp_path)
    log.record(transition(1, Role.TRAIN, True, Moved(10**9)))
    log.record(transition(2, Role.TRAIN, False, Moved(40, 50), Moved(0, 10)))
    log.record(transition(3, Role.TRAIN, True, Moved(10**9)))
    metrics = log.take_metrics()
    assert metrics == {
        "residency/train_onloads": 2,
        "residency/train_offloads": 1,
        "residency/onload_bytes": 2 * 10**9,
        "residency/offload_bytes": 40,
        "residency/dropped_bytes": 60,
        "residency/seconds": 1.5,
        "residency/onload_gb_per_second": 2.0,
        "residency/offload_gb_per_second": pytest.approx(8e-8),
        "residency/for_train_bytes": 2 * 10**9 + 40,
        "residency/for_train_seconds": 1.5,
        "residency/for_train_gb_per_second": pytest.approx((2 + 4e-8) / 1.5),
    }
    assert log.take_metrics() == {"residency/seconds": 0}
    assert all(describe(name).meaning for name in metrics)
    log.close()


def test_a_second_log_goes_on_counting_where_the_file_ends(tmp_path):
    for _ in range(2):
        log = transition_log(tmp_path)
        log.record(transition(1, Role.TRAIN, True, Moved(1), Moved(1)))
        log.close()
    lines = [json.loads(x) for x in (tmp_path / "transitions.jsonl").read_text().splitlines()]
    assert [line["seq"] for line in lines] == [1, 2, 3, 4]
    assert [line["transition"] for line in lines] == [1, 1, 2, 2]
