"""What the device says about what the ledger believes."""

from __future__ import annotations

import logging

import pytest
from recording_roles import RecordingPart, policy

from unirl.residency.planner import ResidencyPlanner
from unirl.residency.policy import Role

GIB = 2**30
ALL = tuple(Role)


class Device:
    """Allocated bytes, as the moves leave them; `leak` of every offload stays."""

    def __init__(self) -> None:
        self.allocated = 9 * GIB
        self.kept_share = 0.0

    def moved(self, part: RecordingPart, move: str) -> None:
        share = 1.0 if move == "onload" else self.kept_share - 1.0
        self.allocated += int(share * part.size)


def planner_on(device: Device) -> ResidencyPlanner:
    parts = {
        role: [RecordingPart(f"{role.value}.weights", 3 * GIB, on_move=device.moved)]
        for role in ALL
    }
    nothing = lambda *_: None  # noqa: E731
    return ResidencyPlanner(
        policy(*ALL), parts, nothing, nothing, allocated_bytes=lambda: device.allocated
    )


def run_cycle(planner: ResidencyPlanner) -> None:
    planner.enter(Role.ROLLOUT)
    planner.enter(Role.REWARD)
    planner.enter(Role.TRAIN)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_moves_that_do_what_they_say_are_silent(caplog):
    device = Device()
    planner = planner_on(device)
    for _ in range(4):
        run_cycle(planner)
    assert warnings(caplog) == []


def test_an_offload_that_frees_less_than_it_moved_is_told_with_both_numbers(caplog):
    device = Device()
    planner = planner_on(device)
    run_cycle(planner)
    device.kept_share = 0.5
    planner.enter(Role.ROLLOUT)
    assert warnings(caplog)[0] == (
        "train offload gave back 1.5 GiB of 3.0 GiB: somebody still holds the memory of weights "
        "that left"
    )


def test_memory_that_grows_beside_the_weights_is_told_once_per_gib(caplog):
    device = Device()
    planner = planner_on(device)
    for _ in range(2):
        run_cycle(planner)
    device.allocated += GIB // 2
    run_cycle(planner)
    assert warnings(caplog) == [], "half a GiB is noise"
    device.allocated += GIB
    planner.enter(Role.ROLLOUT)
    planner.enter(Role.ROLLOUT)
    (told,) = warnings(caplog)
    assert told.startswith("memory beside the weights grew from 0.0 MiB to 1.5 GiB")
    assert "rollout phase" in told


def test_a_device_that_cannot_be_asked_is_not_judged(caplog):
    parts = {role: [RecordingPart(f"{role.value}.weights", 3 * GIB)] for role in ALL}
    nothing = lambda *_: None  # noqa: E731
    planner = ResidencyPlanner(policy(*ALL), parts, nothing, nothing)
    for _ in range(3):
        run_cycle(planner)
    assert warnings(caplog) == []
