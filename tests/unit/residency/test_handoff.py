"""Roles that leave while another comes: both sides are there at once, or nobody has moved."""

from __future__ import annotations

import itertools

import pytest
from recording_roles import policy
from slab import HeldPart, Memory, Setup, Slab

from unirl.core.components import Parking
from unirl.core.errors import ResidencyError
from unirl.residency.directory import Directory, State
from unirl.residency.handoff import OverlappedHandoff
from unirl.residency.ledger import Ledger
from unirl.residency.planner import ResidencyPlanner
from unirl.residency.policy import Role
from unirl.residency.transaction import Transaction
from unirl.residency.transition import MoveRule, Transition

TRAIN, ROLLOUT, REWARD = Role.TRAIN, Role.ROLLOUT, Role.REWARD
AMPLE = 1000


class Desk:
    """Two written parts that can leave and three that can come, of 10 bytes each."""

    def __init__(self, budget_bytes: int | None = 50) -> None:
        self.memory = memory = Memory()
        self.leaving = [HeldPart(memory, f"train.{n}", contents=n) for n in range(2)]
        self.coming = [
            HeldPart(memory, "rollout.base", contents=7, is_resident=False),
            HeldPart(memory, "rollout.graphs", parking=Parking.REBUILD, is_resident=False),
            HeldPart(memory, "rollout.vae", contents=8, is_resident=False),
        ]
        self.parts = [*self.leaving, *self.coming]
        self.directory = Directory(self.parts)
        self.ledger = Ledger(None)
        self.ledger.read(self.parts)
        self.transaction = Transaction(self.directory, self.ledger)
        self.handoff = OverlappedHandoff(
            self.directory, self.ledger, self.transaction, budget_bytes
        )

    def run(self):
        return self.handoff.run(self.leaving, self.coming, lambda: self.memory.used_bytes)

    def require_untouched(self) -> None:
        """All is where it was at first, for the directory and the ledger too."""
        assert [part.is_resident for part in self.parts] == [True] * 2 + [False] * 3
        away = [State.PARKED, State.DROPPED, State.PARKED]
        states = [self.directory.state(part) for part in self.parts]
        assert states == [State.RESIDENT] * 2 + away
        assert self.memory.used_bytes == self.ledger.device_bytes == 20
        assert [part.contents for part in self.leaving] == [0, 1]
        memory = self.memory
        assert memory.leaving | memory.coming | memory.written == set()


# --- when -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "pays"), [(None, False), (49, False), (50, True)])
def test_it_pays_where_both_sides_fit_together(budget, pays):
    desk = Desk(budget)
    assert desk.handoff.pays(desk.leaving, desk.coming) is pays


def test_it_does_not_pay_where_only_one_way_has_bytes_to_copy():
    desk = Desk(AMPLE)
    frozen = HeldPart(desk.memory, "train.base", is_resident=False)
    directory = Directory([*desk.parts, frozen])
    frozen.unpark()  # so the host has what the device has
    handoff = OverlappedHandoff(directory, desk.ledger, desk.transaction, AMPLE)
    assert not handoff.pays([frozen], desk.coming)
    assert not handoff.pays(desk.leaving, desk.coming[1:2]), "what is rebuilt is not copied"
    assert not handoff.pays(desk.leaving, [])
    desk.leaving[0].size = 0
    assert not handoff.pays(desk.leaving[:1], desk.coming)


# --- how ------------------------------------------------------------------------------------------


def test_all_has_come_before_anything_is_freed_and_the_peak_is_both_sides():
    desk = Desk()
    handed = desk.run()
    come, left = ["in rollout.base", "in rollout.graphs", "in rollout.vae"], ["train.0", "train.1"]
    assert desk.memory.operations == [*come, *(f"copy {name}" for name in left)]
    assert desk.memory.peak_of_both == desk.ledger.peak_device_bytes == 50
    assert desk.memory.used_bytes == desk.ledger.device_bytes == 30
    assert [move.component for move in handed.left] == left
    assert [move.device_bytes for move in handed.left] == [50, 50]
    assert [move.device_bytes for move in handed.came] == [30, 30, 30]
    assert handed.allocated_bytes == 50
    assert [part.contents for part in desk.coming] == [7, 0, 8]
    assert [part.read() for part in desk.leaving] == [0, 1]


def test_a_host_copy_that_is_being_written_is_read_only_when_it_is_whole():
    """The memory raises where it is read earlier."""
    desk = Desk()
    trained = HeldPart(desk.memory, "train.adapter", contents=5, host_key="adapter")
    sampled = HeldPart(desk.memory, "rollout.adapter", host_key="adapter", is_resident=False)
    trained.write(6)
    handoff = OverlappedHandoff(Directory([trained, sampled]), desk.ledger, desk.transaction, AMPLE)
    handoff.run([trained], [sampled], lambda: None)
    assert sampled.contents == 6
    assert not trained.is_resident


def test_seconds_of_each_side_add_up_to_those_of_the_handoff():
    desk = Desk()
    desk.coming[0].size = 30
    desk.ledger.read(desk.parts)
    handed = desk.run()
    out, inward = (sum(move.seconds for move in side) for side in (handed.left, handed.came))
    assert out == pytest.approx(inward)
    assert handed.came[0].seconds == pytest.approx(0.6 * inward), "by their bytes"


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize("error", [OSError("stuck"), KeyboardInterrupt("stuck")])
def test_wherever_it_fails_everything_stays_and_it_can_be_repeated(position, at_start, error):
    desk = Desk()
    desk.memory.error = error
    faults = {position}
    desk.memory.faults, desk.memory.faults_at_start = (
        (set(), faults) if at_start else (faults, set())
    )
    with pytest.raises(type(error), match="stuck"):
        desk.run()
    desk.require_untouched()
    desk.transaction.require_sound()
    desk.run()
    assert [part.contents for part in desk.coming] == [7, 0, 8]


def test_what_came_is_given_back_before_what_left_comes_back():
    desk = Desk()
    desk.memory.faults = {4}  # the second of those that leave, when one of them has left
    with pytest.raises(OSError, match="stuck"):
        desk.run()
    assert desk.memory.operations[3:] == [
        "copy train.0",
        *(f"drop {part.name}" for part in reversed(desk.coming)),
        "in train.0",
    ]
    assert desk.memory.peak_bytes == 50, "the room that was promised is enough for the way back"
    desk.require_untouched()


@pytest.mark.parametrize("second", range(5, 9))
def test_only_giving_back_that_fails_poisons_and_the_others_are_still_given_back(second):
    desk = Desk()
    desk.memory.faults = {4, second}
    with pytest.raises(OSError, match="stuck") as caught:
        desk.run()
    with pytest.raises(ResidencyError, match=r"could not be undone \(.*stuck; undoing it: stuck"):
        desk.transaction.require_sound()
    states = [desk.directory.state(part) for part in desk.parts]
    assert states.count(State.POISONED) == 1
    assert any("failed too: stuck" in note for note in caught.value.__notes__)
    moved = [operation.split()[1] for operation in desk.memory.operations[4:]]
    assert len(moved) == 3, "those whose way back did not fail"


# --- the planner ----------------------------------------------------------------------------------


def loop(slab: Slab) -> None:
    for _ in range(3):
        slab.rollout(sync=True)
        slab.score()
        slab.step()
    slab.evaluate(2, sync=True)
    slab.save_device()


def test_transitions_and_their_order_are_those_of_release_first():
    plain, both = Slab(), Slab(Setup(free_for_both=AMPLE))
    for slab in (plain, both):
        loop(slab)
    assert both.texts() == plain.texts()
    assert both.events.seen == plain.events.seen
    assert [t.seq for t in both.records] == [t.seq for t in plain.records]
    rules = {(t.text, t.cause) for t in both.records if t.rule is MoveRule.OVERLAP}
    assert ("train offload", "enter rollout") in rules
    assert ("rollout onload", "enter rollout") in rules
    assert all(t.rule is MoveRule.RELEASE_FIRST for t in plain.records)
    assert both.memory.peak_bytes > plain.memory.peak_bytes


def test_an_overlapped_handoff_ends_with_its_one_onload():
    slab = Slab(Setup(free_for_both=AMPLE))
    loop(slab)
    overlapped = [t for t in slab.records if t.rule is MoveRule.OVERLAP]
    handoffs = [
        [t.to_device for t in group]
        for _, group in itertools.groupby(overlapped, lambda transition: transition.cause)
    ]
    assert handoffs
    for directions in handoffs:
        assert directions[-1] is True
        assert False in directions


def test_where_both_do_not_fit_nothing_changes_but_the_rule():
    slab = Slab(Setup(free_for_both=1))
    loop(slab)
    assert {t.rule for t in slab.records} == {MoveRule.RELEASE_FIRST}
    assert slab.memory.peak_of_both == 0


def test_log_lines_are_as_ever():
    slab = Slab(Setup(free_for_both=AMPLE))
    said: list[str] = []
    slab.planner._announce = lambda done: said.append(", ".join(t.text for t in done))
    slab.rollout()
    assert said[:2] == ["train offload, reward offload", "rollout onload"]
    assert slab.records[0].rule is MoveRule.OVERLAP


def test_a_handoff_that_fails_changes_no_role_and_names_what_it_moved():
    slab = Slab(Setup(free_for_both=AMPLE))
    slab.memory.faults = {2}
    with pytest.raises(OSError, match="stuck") as caught:
        slab.planner.enter(ROLLOUT)
    assert "while moving: train, reward, cause: enter rollout" in caught.value.__notes__
    assert slab.records == []
    assert [slab.planner.is_on_device(role) for role in Role] == [True, False, True]
    slab.planner.enter(ROLLOUT)
    assert slab.texts() == ["train offload", "reward offload", "rollout onload"]


def test_a_poisoned_planner_starts_no_handoff():
    slab = Slab(Setup(free_for_both=AMPLE))
    slab.planner._transaction.lose(slab.parts[TRAIN][0], "a test")
    with pytest.raises(ResidencyError, match="a test"):
        slab.planner.enter(ROLLOUT)
    assert slab.memory.operations == []


def test_components_of_two_leaving_roles_leave_once():
    memory = Memory()
    shared = HeldPart(memory, "shared", contents=4)
    own = HeldPart(memory, "rollout.own", contents=5, is_resident=False)
    records: list[Transition] = []
    planner = ResidencyPlanner(
        policy(*Role),
        {TRAIN: [shared], REWARD: [shared], ROLLOUT: [own]},
        records.append,
        lambda: None,
        overlap_bytes=AMPLE,
        announce=lambda transitions: None,
    )
    planner.enter(ROLLOUT)
    assert memory.operations == ["in rollout.own", "copy shared"]
    assert [[move.component for move in t.moves] for t in records] == [
        [],
        ["shared"],
        ["rollout.own"],
    ]
