"""Moves of several components: all of them or none, and poison where that cannot be had."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from slab import HeldPart, Memory

from unirl.core.components import Moved, Parking
from unirl.core.errors import ResidencyError
from unirl.residency.directory import Directory, State
from unirl.residency.ledger import Ledger
from unirl.residency.transaction import Transaction

NAMES = ("train.base", "train.adapter", "train.moments", "train.buffers")
SOUND = [State.RESIDENT] * 4


class Desk:
    """Four components of 10 bytes on the device, and what moves them."""

    def __init__(self, *, is_resident: bool = True, budget_bytes: int | None = None) -> None:
        self.memory = Memory()
        self.parts = [
            HeldPart(self.memory, name, contents=number, is_resident=is_resident)
            for number, name in enumerate(NAMES)
        ]
        self.directory = Directory(self.parts)
        self.ledger = Ledger(budget_bytes)
        self.ledger.read(self.parts)
        self.transaction = Transaction(self.directory, self.ledger)

    @property
    def states(self) -> list[State]:
        return [self.directory.state(part) for part in self.parts]

    @property
    def residents(self) -> list[bool]:
        return [part.is_resident for part in self.parts]

    def fail(
        self, *faults: int, to_device: bool = False, error: BaseException | None = None
    ) -> BaseException:
        """Run a transaction in which these operations fail; returns what it raised."""
        self.memory.faults, self.memory.error = set(faults), error or OSError("stuck")
        with pytest.raises(type(self.memory.error)) as caught:
            self.transaction.run(self.parts, to_device=to_device)
        self.memory.faults = set()
        return caught.value


# --- all of it ------------------------------------------------------------------------------------


def test_moves_are_made_in_order_and_each_is_described():
    desk = Desk()
    desk.parts[1].num_writes = 3
    moves = desk.transaction.run(desk.parts, to_device=False)
    assert desk.memory.operations == [f"copy {name}" for name in NAMES]
    assert [(move.component, move.source, move.target) for move in moves] == [
        (name, State.RESIDENT, State.PARKED) for name in NAMES
    ]
    assert [move.version for move in moves] == ["0", "3", "0", "0"]
    assert [move.moved for move in moves] == [Moved(10)] * 4
    assert [move.device_bytes for move in moves] == [30, 20, 10, 0]
    assert [move.host_bytes for move in moves] == [10, 20, 30, 40]
    assert all(move.seconds >= 0 for move in moves)


def test_only_what_is_newer_than_its_host_copy_is_copied():
    desk = Desk()
    desk.transaction.run(desk.parts, to_device=False)
    desk.transaction.run(desk.parts, to_device=True)
    desk.parts[2].write(77)
    desk.memory.operations.clear()
    moves = desk.transaction.run(desk.parts, to_device=False)
    kinds = [operation.split()[0] for operation in desk.memory.operations]
    assert kinds == ["drop", "drop", "copy", "drop"]
    assert [move.moved for move in moves] == [Moved(0, 10), Moved(0, 10), Moved(10), Moved(0, 10)]


def test_what_comes_in_has_the_version_of_its_host_copy():
    desk = Desk()
    desk.parts[1].write(5)
    desk.transaction.run(desk.parts, to_device=False)
    moves = desk.transaction.run(desk.parts, to_device=True)
    assert [move.version for move in moves] == ["0", "1", "0", "0"]
    assert [part.contents for part in desk.parts] == [0, 5, 2, 3]


def test_what_comes_in_is_not_asked_for_its_version_before(monkeypatch: pytest.MonkeyPatch):
    """A server that sleeps cannot answer."""
    desk = Desk(is_resident=False)

    def asleep() -> None:
        raise AssertionError("asked while it was away")

    for part in desk.parts:
        monkeypatch.setattr(part, "version", asleep)
    moves = desk.transaction.run(desk.parts, to_device=True)
    assert [move.version for move in moves] == ["0"] * 4


def test_nothing_to_move_is_no_move():
    desk = Desk()
    assert desk.transaction.run([], to_device=False) == ()
    assert desk.memory.operations == []


# --- or none --------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_device", [False, True])
@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("error", [OSError("stuck"), KeyboardInterrupt("stuck")], ids=repr)
def test_wherever_a_move_fails_the_ones_before_it_are_undone_in_reverse_order(
    to_device, position, error
):
    desk = Desk(is_resident=not to_device)
    assert desk.fail(position, to_device=to_device, error=error) is error
    moved = [operation.split()[1] for operation in desk.memory.operations]
    assert moved == [*NAMES[:position], *reversed(NAMES[:position])]
    assert desk.residents == [not to_device] * 4
    assert desk.states == ([State.PARKED] * 4 if to_device else SOUND)
    assert desk.ledger.device_bytes == desk.memory.used_bytes == (0 if to_device else 40)
    desk.transaction.require_sound()
    desk.transaction.run(desk.parts, to_device=to_device)
    assert desk.residents == [to_device] * 4


def test_undone_parts_keep_what_was_written():
    desk = Desk()
    desk.transaction.run(desk.parts, to_device=False)
    desk.transaction.run(desk.parts, to_device=True)
    desk.parts[0].write(50)
    desk.fail(2)
    assert [part.contents for part in desk.parts] == [50, 1, 2, 3]


def test_undoing_an_onload_copies_nothing_that_the_host_has():
    desk = Desk(is_resident=False)
    desk.fail(3, to_device=True)
    assert [o for o in desk.memory.operations if o.startswith("copy")] == []


def test_a_host_copy_that_was_made_before_the_failure_is_accounted():
    desk = Desk()
    desk.memory.fails_after_the_copy = True
    desk.fail(1)
    assert desk.memory.host.keys() == {"train.base", "train.adapter"}
    assert desk.ledger.host_bytes == 20


def test_what_does_not_fit_is_not_brought_in_and_what_came_before_it_leaves():
    desk = Desk(is_resident=False, budget_bytes=25)
    with pytest.raises(ResidencyError, match=r"train.moments needs .* device_budget_gib"):
        desk.transaction.run(desk.parts, to_device=True)
    assert desk.residents == [False] * 4
    assert desk.memory.peak_bytes == 20
    desk.transaction.require_sound()


def test_an_illegal_move_is_refused_before_the_part_is_touched():
    desk = Desk()
    with pytest.raises(ResidencyError, match=r"train.base is resident and cannot become moving in"):
        Transaction(desk.directory, desk.ledger).run(desk.parts, to_device=True)
    assert desk.memory.operations == []


# --- poison ---------------------------------------------------------------------------------------


def refusal(desk: Desk) -> str:
    with pytest.raises(ResidencyError) as caught:
        desk.transaction.require_sound()
    return str(caught.value)


@pytest.mark.parametrize("second", [OSError("stuck"), KeyboardInterrupt("stuck")], ids=repr)
def test_a_failed_undo_poisons_with_the_cause_and_the_others_are_still_undone(second):
    desk = Desk()
    error = desk.fail(2, 3, error=second)
    assert error.__notes__ == ["undoing the move of train.adapter failed too: stuck"]
    poisoned = [State.RESIDENT, State.POISONED, State.RESIDENT, State.RESIDENT]
    assert desk.states == poisoned
    assert desk.residents == [True, False, True, True]
    assert refusal(desk) == (
        "weights are in an unknown place since a move failed and could not be undone "
        "(train.adapter: stuck; undoing it: stuck). Start the run again from its last checkpoint."
    )


def test_the_first_of_several_causes_is_told_and_each_is_a_note():
    desk = Desk()
    error = desk.fail(2, 3, 4)
    assert error.__notes__ == [
        "undoing the move of train.adapter failed too: stuck",
        "undoing the move of train.base failed too: stuck",
    ]
    assert "(train.adapter: stuck" in refusal(desk)


def test_poison_stays_when_later_moves_fail_too():
    desk = Desk()
    desk.fail(2, 3)
    first = refusal(desk)
    desk.parts = [part for part in desk.parts if part.name != "train.adapter"]
    desk.fail(1, 2)
    assert refusal(desk) == first


class TornPart(HeldPart):
    """Fails to move, and fails to restore itself."""

    def park(self, *, copy: bool) -> Moved:
        super().park(copy=copy)
        raise OSError("torn")

    def unpark(self) -> Moved:
        super().unpark()
        raise OSError("torn")


@pytest.mark.parametrize("to_device", [False, True])
def test_a_part_that_is_not_where_it_was_when_it_fails_poisons(to_device):
    desk = Desk(is_resident=not to_device)
    desk.parts[1] = TornPart(desk.memory, "train.adapter", is_resident=not to_device)
    with pytest.raises(OSError, match="torn"):
        desk.transaction.run(desk.parts, to_device=to_device)
    assert desk.states[1] is State.POISONED
    assert desk.residents[0] is not to_device, "what came before it is undone all the same"
    assert "(train.adapter: torn)" in refusal(desk)


@pytest.mark.parametrize(
    "parking", [Parking.DROP, Parking.REBUILD], ids=lambda parking: parking.value
)
def test_undoing_brings_back_what_takes_no_host_memory(parking):
    desk = Desk()
    desk.parts[0] = HeldPart(desk.memory, "train.base", parking=parking)
    directory = Directory(desk.parts)
    desk.memory.faults = {1}
    parts: Sequence[HeldPart] = desk.parts[:2]
    with pytest.raises(OSError, match="stuck"):
        Transaction(directory, desk.ledger).run(parts, to_device=False)
    assert desk.residents == [True] * 4
    assert directory.state(desk.parts[0]) is State.RESIDENT
