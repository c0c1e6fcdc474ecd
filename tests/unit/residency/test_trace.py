"""The record of moves on disk and in metrics."""

from __future__ import annotations

import json

from unirl.core.components import Moved
from unirl.residency.planner import Transition
from unirl.residency.policy import Role
from unirl.residency.trace import TransitionLog
from unirl.tracking.metrics import describe


def transition(seq: int, role: Role, to_device: bool, moved: Moved) -> Transition:
    return Transition(seq, role, to_device, "enter train", moved, seconds=0.5)


def test_a_line_holds_who_moved_where_why_and_how_much(tmp_path):
    log = TransitionLog(tmp_path / "transitions.jsonl")
    log.at(3)
    log.record(transition(7, Role.REWARD, False, Moved(100, 28)))
    (line,) = (tmp_path / "transitions.jsonl").read_text().splitlines()  # before close
    log.close()
    assert json.loads(line) == {
        "seq": 7,
        "rollout": 3,
        "role": "reward",
        "move": "offload",
        "cause": "enter train",
        "moved_bytes": 100,
        "dropped_bytes": 28,
        "seconds": 0.5,
    }


def test_metrics_count_since_they_were_last_taken(tmp_path):
    log = TransitionLog(tmp_path / "transitions.jsonl")
    log.record(transition(1, Role.TRAIN, True, Moved(100)))
    log.record(transition(2, Role.TRAIN, False, Moved(40, 60)))
    log.record(transition(3, Role.TRAIN, True, Moved(100)))
    metrics = log.take_metrics()
    assert metrics == {
        "residency/train_onloads": 2,
        "residency/train_offloads": 1,
        "residency/moved_bytes": 240,
        "residency/seconds": 1.5,
    }
    assert log.take_metrics() == {"residency/seconds": 0}
    assert all(describe(name).meaning for name in metrics)
    log.close()


def test_a_second_log_appends(tmp_path):
    for seq in (1, 2):
        log = TransitionLog(tmp_path / "transitions.jsonl")
        log.record(transition(seq, Role.TRAIN, True, Moved(1)))
        log.close()
    assert len((tmp_path / "transitions.jsonl").read_text().splitlines()) == 2
