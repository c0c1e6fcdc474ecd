"""The planner's moves, one by one."""

from __future__ import annotations

import logging

import pytest
from recording_roles import RecordingPart, RecordingRoles, make_planner, policy

from unirl.core.components import Moved
from unirl.residency.planner import ResidencyPlanner
from unirl.residency.policy import Role
from unirl.residency.transition import Transition

TRAIN, ROLLOUT, REWARD = Role.TRAIN, Role.ROLLOUT, Role.REWARD
ALL = (TRAIN, ROLLOUT, REWARD)


def run_rollout(planner) -> None:
    """What the loop asks for in one rollout and one optimizer step."""
    planner.enter(ROLLOUT)
    planner.set(ROLLOUT, on_device=False)
    planner.enter(REWARD)
    planner.enter(TRAIN)


ROLLOUT_PAIR = ["rollout onload", "rollout offload"]


@pytest.mark.parametrize(
    ("tracked", "parked", "first", "later"),
    [
        (ALL, [ROLLOUT], ROLLOUT_PAIR, ROLLOUT_PAIR),
        (ALL, [], ["rollout onload"], []),
        (
            ALL,
            [TRAIN, ROLLOUT],
            ["train offload", *ROLLOUT_PAIR, "train onload"],
            ["train offload", *ROLLOUT_PAIR, "train onload"],
        ),
        (
            ALL,
            [TRAIN, ROLLOUT, REWARD],
            [
                "train offload",
                "reward offload",
                *ROLLOUT_PAIR,
                "reward onload",
                "reward offload",
                "train onload",
            ],
            [
                "train offload",
                *ROLLOUT_PAIR,
                "reward onload",
                "reward offload",
                "train onload",
            ],
        ),
        ((ROLLOUT, REWARD), [TRAIN, ROLLOUT], ROLLOUT_PAIR, ROLLOUT_PAIR),
        ((TRAIN, ROLLOUT), [ROLLOUT, REWARD], ROLLOUT_PAIR, ROLLOUT_PAIR),
        (
            (ROLLOUT, REWARD),
            [ROLLOUT, REWARD],
            ["reward offload", *ROLLOUT_PAIR, "reward onload", "reward offload"],
            [*ROLLOUT_PAIR, "reward onload", "reward offload"],
        ),
        (
            ALL,
            [TRAIN, REWARD],
            [
                "train offload",
                "reward offload",
                "rollout onload",
                "reward onload",
                "reward offload",
                "train onload",
            ],
            ["train offload", "reward onload", "reward offload", "train onload"],
        ),
    ],
    ids=[
        "defaults",
        "all resident",
        "train parked",
        "all parked",
        "train untracked",
        "reward on its own slab",
        "train untracked, reward parked",
        "rollout pinned",
    ],
)
def test_transitions_of_a_rollout(tracked, parked, first, later):
    roles = RecordingRoles(tracked)
    planner = make_planner(roles, parked)
    run_rollout(planner)
    assert roles.take() == first
    for _ in range(2):
        run_rollout(planner)
        assert roles.take() == later


def test_entering_an_untracked_role_still_parks_the_others():
    roles = RecordingRoles((ROLLOUT, REWARD))
    make_planner(roles, [TRAIN, REWARD]).enter(TRAIN)
    assert roles.take() == ["reward offload"]


def test_a_pinned_role_is_never_taken_off_the_device():
    roles = RecordingRoles()
    planner = make_planner(roles, [])
    for role in ALL:
        planner.enter(role)
        for other in ALL:
            planner.set(other, on_device=False)
    assert [move for move in roles.moves if move.endswith("offload")] == []


def test_a_preserved_role_stays_through_the_phase():
    roles = RecordingRoles()
    planner = make_planner(roles, ALL)
    planner.enter(ROLLOUT)
    roles.take()
    planner.enter(REWARD, preserve=[ROLLOUT])
    assert roles.take() == ["reward onload"]
    planner.enter(REWARD)
    assert roles.take() == ["rollout offload"]


def test_set_moves_one_role_and_nothing_else():
    roles = RecordingRoles()
    planner = make_planner(roles, ALL)
    planner.set(ROLLOUT, on_device=True)
    assert roles.take() == ["rollout onload"]
    assert all(planner.is_on_device(role) for role in ALL)


@pytest.mark.parametrize(
    ("tracked", "parked", "expected"),
    [(ALL, ALL, set(ALL)), (ALL, [ROLLOUT], {ROLLOUT}), ((ROLLOUT,), ALL, {ROLLOUT})],
)
def test_parkable_means_tracked_and_not_pinned(tracked, parked, expected):
    planner = make_planner(RecordingRoles(tracked), parked)
    assert {role for role in ALL if planner.parkable(role)} == expected


def test_the_policy_pins_what_it_calls_resident():
    for parked in (ALL, (), (TRAIN,), (ROLLOUT, REWARD)):
        assert {role for role in ALL if not policy(*parked).is_pinned(role)} == set(parked)


# --- log and records ------------------------------------------------------------------------------


def test_each_batch_is_one_log_line_and_batches_without_moves_are_silent(caplog):
    planner = make_planner(RecordingRoles(), ALL)
    with caplog.at_level(logging.INFO, logger="unirl.residency"):
        run_rollout(planner)
        planner.enter(TRAIN)
    assert [record.getMessage() for record in caplog.records] == [
        "lifecycle residency: train offload, reward offload",
        "lifecycle residency: rollout onload",
        "lifecycle residency: rollout offload",
        "lifecycle residency: reward onload",
        "lifecycle residency: reward offload",
        "lifecycle residency: train onload",
    ]
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_each_move_is_recorded_with_its_cause_and_bytes():
    records: list[Transition] = []
    planner = make_planner(RecordingRoles(), ALL, records)
    planner.enter(ROLLOUT)
    planner.set(ROLLOUT, on_device=False)
    assert [(t.seq, t.text, t.cause, t.moved) for t in records] == [
        (1, "train offload", "enter rollout", Moved(10)),
        (2, "reward offload", "enter rollout", Moved(10)),
        (3, "rollout onload", "enter rollout", Moved(10)),
        (4, "rollout offload", "set rollout", Moved(0, dropped_bytes=10)),
    ]
    assert all(t.seconds >= 0 for t in records)


# --- failures -------------------------------------------------------------------------------------


def test_a_failed_offload_keeps_the_next_role_off_and_can_be_tried_again():
    roles = RecordingRoles(failing={"train offload"})
    planner = make_planner(roles, ALL)
    with pytest.raises(OSError, match="train offload failed"):
        planner.enter(ROLLOUT)
    assert roles.take() == ["reward offload"], "the other moves of the batch are still tried"
    assert planner.is_on_device(TRAIN)
    assert not planner.is_on_device(ROLLOUT)
    roles.failing.clear()
    planner.enter(ROLLOUT)
    assert roles.take() == ["train offload", "rollout onload"]


def test_a_failed_onload_can_be_tried_again():
    roles = RecordingRoles(failing={"rollout onload"})
    planner = make_planner(roles, ALL)
    with pytest.raises(OSError, match="rollout onload failed"):
        planner.enter(ROLLOUT)
    assert not planner.is_on_device(ROLLOUT)
    roles.failing.clear()
    roles.take()
    planner.enter(ROLLOUT)
    assert roles.take() == ["rollout onload"]


def test_the_first_of_several_failures_is_raised_and_names_the_move_and_the_others():
    roles = RecordingRoles(failing={"train offload", "reward offload"})
    with pytest.raises(OSError, match="train offload failed") as caught:
        make_planner(roles, ALL).enter(ROLLOUT)
    assert caught.value.__notes__ == [
        "while moving: train, cause: enter rollout",
        "also failed: reward offload failed",
    ]


def test_moves_done_before_a_failure_are_logged_and_recorded(caplog):
    records: list[Transition] = []
    planner = make_planner(RecordingRoles(failing={"train offload"}), ALL, records)
    with caplog.at_level(logging.INFO), pytest.raises(OSError, match="failed"):
        planner.enter(ROLLOUT)
    assert [t.text for t in records] == ["reward offload"]
    assert caplog.messages == ["lifecycle residency: reward offload"]


# --- loans ----------------------------------------------------------------------------------------


def on_loan(records: list[Transition]) -> tuple[ResidencyPlanner, RecordingPart, RecordingPart]:
    """A trainer whose moments come on demand."""
    base = RecordingPart("train.base")
    moments = RecordingPart("train.moments", written_by="optimizer step")
    moments.on_demand = True
    components = {TRAIN: [base, moments], ROLLOUT: [], REWARD: []}
    planner = ResidencyPlanner(policy(*ALL), components, records.append, lambda: None)
    return planner, base, moments


def test_what_comes_on_demand_is_there_only_while_it_is_borrowed():
    records: list[Transition] = []
    planner, base, moments = on_loan(records)
    for _ in range(2):
        planner.enter(TRAIN)
        planner.require_live(TRAIN)
        with planner.borrowed("optimizer step"):
            assert moments.is_resident
            moments.writes = (moments.writes or 0) + 1
        assert base.is_resident
        assert not moments.is_resident
        planner.enter(ROLLOUT)
    assert [t.text for t in records if t.is_loan] == [
        "train offload of train.moments",
        "train onload of train.moments",
        "train offload of train.moments",
    ]
    assert moments.moved == ["copy", "in", "copy"], "the step wrote them each time"


def test_what_was_borrowed_is_parked_also_after_a_failure():
    planner, _, moments = on_loan([])
    with pytest.raises(OSError, match="full"), planner.borrowed("optimizer step"):
        raise OSError("full")
    assert not moments.is_resident


def test_a_loan_of_nothing_moves_and_says_nothing(caplog):
    records: list[Transition] = []
    planner = make_planner(RecordingRoles(), ALL, records)
    with caplog.at_level(logging.INFO), planner.borrowed("optimizer step"):
        pass
    assert records == []
    assert caplog.messages == []
