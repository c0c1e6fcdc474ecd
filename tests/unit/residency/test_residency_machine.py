"""Twelve invariants of who is on the device, under any loop, policy, sizes and failures.

Where each is checked:

    I1   device bytes never exceed the budget ............ check_memory; the peak is of every move,
                                                           also while some leave and others come
    I2   what works is there, with its newest contents ... Slab.require_work, whenever a role works
    I3   no two copies of one version differ ............. check_copies
    I4   what is parked has a host copy of its version ... check_copies, and each read and save
    I5   no move and no transition changes nothing ....... check_transitions, duplicate requests
    I6   logged bytes add up to the ledger ............... check_transitions
    I7   after any error states are legal and the next
         request works, or the run is poisoned ........... check_states, a_move_fails, poisoned rule
    I8   untracked components never move ................. check_untracked
    I9   the trainer never comes beside a parkable reward  _watch_trainer, at every single move
    I10  one trip of the trainer a window and save ....... check_trips
    I11  frozen weights cross to the host at most once ... check_frozen
    I12  equal inputs, equal moves ....................... peek, and teardown runs everything again

Mutants of planner, transaction and directory, each of which breaks one of them, must be caught.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations
from typing import Any

import pytest
from fake_device import InjectedError
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from naive_planner import (
    BringsTheTrainerBack,
    CopiesAlways,
    ForgetsToGiveBack,
    ForgetsToUndo,
    FreesBeforeAllIsThere,
    GoesOnWhenUndoingFails,
    LeavesOneBehind,
    LedgerThatNeverFrees,
    MovesAlways,
    NeverCopiesAgain,
    OrderOfTheDay,
    OverlapsWithoutRoom,
    ParksBystanders,
    SkipsTheBudget,
    TrainsBesideTheReward,
)
from slab import ALL, HeldPart, Setup, Slab

from unirl.core.components import Parking, Version
from unirl.core.errors import ResidencyError
from unirl.residency.directory import State
from unirl.residency.planner import ResidencyPlanner
from unirl.residency.policy import Role
from unirl.residency.transition import MoveRule, Transition

SUBSETS = st.sampled_from([frozenset(c) for n in range(4) for c in combinations(ALL, n)])
SETTINGS = settings(
    max_examples=300,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],
)
SETUPS = st.builds(
    Setup,
    parked=SUBSETS,
    tracked=st.one_of(st.just(frozenset(ALL)), SUBSETS),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=7),
    shares_base=st.booleans(),
    forgets=st.booleans(),
    reads_parked=st.booleans(),
    free_bytes=st.one_of(st.none(), st.integers(0, 200)),
    free_for_both=st.one_of(st.none(), st.integers(0, 200)),
)
ACTIONS = st.sampled_from(
    [
        ("rollout", {"sync": True}),
        ("rollout", {"sync": False}),
        ("score", {}),
        ("step", {}),
        ("push_only", {}),
        ("evaluate", {"num_chunks": 2, "sync": True}),
        ("evaluate", {"num_chunks": 2, "sync": False}),
        ("save_device", {}),
    ]
)
ENTERING = ("score", "step", "save_device", "planner.enter")
"""Requests that end with a role that enters."""
REFUSALS = ("device_budget_gib", "the rollout role cannot work")
"""What a sound planner may answer: over budget, and an adapter that a forgetting engine lost."""


class ResidencyMachine(RuleBasedStateMachine):
    """The loop's requests in any order, with failures in between."""

    planner_class: type[ResidencyPlanner] = ResidencyPlanner

    def __init__(self) -> None:
        super().__init__()
        self.script: list[tuple[str, dict[str, Any], dict[str, Any]]] = []

    @initialize(setup=SETUPS)
    def build(self, setup: Setup) -> None:
        self.setup = setup
        self.poisoned = False
        self.num_checked = 0
        self.slab = self._new_slab()
        self.first_bytes = self.slab.memory.used_bytes

    def _new_slab(self) -> Slab:
        slab = Slab(self.setup, self.planner_class)
        slab.memory.on_operation = lambda operation: _watch_trainer(slab, operation)
        return slab

    def teardown(self) -> None:
        if not self.script:
            return
        again = self._new_slab()
        for name, arguments, failures in self.script:
            _play(again, name, arguments, failures)
        assert _plan_text(again) == _plan_text(self.slab), "I12: the same run, other moves"

    def _do(self, name: str, arguments: dict[str, Any], **failures: Any) -> BaseException | None:
        """Run one request; returns the error that was asked for, or a refusal."""
        self.script.append((name, arguments, failures))
        error = _play(self.slab, name, arguments, failures)
        if isinstance(error, ResidencyError):
            self._require_just(error)
        if error is None and name in ENTERING:
            self._require_room_made(arguments.get("preserve", ()))
        return error

    def _require_room_made(self, preserve: Collection[Role]) -> None:
        """What no role on the device needs has left, also where an earlier request failed."""
        planner = self.slab.planner
        working = [r for r in ALL if r in preserve or planner.is_on_device(r)]
        needed = {part.name for role in working for part in self.slab.parts[role]}
        left = [
            part.name
            for part in self._tracked_parts()
            if part.is_resident and part.parking is not Parking.KEEP and part.name not in needed
        ]
        assert left == [], "I7: left behind on the device"

    def _require_just(self, error: ResidencyError) -> None:
        assert any(text in str(error) for text in REFUSALS), f"I7: {error}"
        if REFUSALS[1] in str(error):
            assert self.setup.forgets, f"I2: {error}"

    # --- the loop -------------------------------------------------------------------------------

    @precondition(lambda self: not self.poisoned)
    @rule(num_rollouts=st.integers(1, 3), sync=st.booleans())
    def window(self, num_rollouts: int, sync: bool) -> None:
        """Rollouts, and one step on all of them."""
        for _ in range(num_rollouts):
            self._do("rollout", {"sync": sync})
            self._do("score", {})
        self._do("step", {})

    @precondition(lambda self: not self.poisoned)
    @rule(action=ACTIONS)
    def one_request(self, action: tuple[str, dict[str, Any]]) -> None:
        self._do(*action)

    @precondition(lambda self: not self.poisoned)
    @rule()
    def a_save_from_the_host_moves_nothing(self) -> None:
        before = len(self.slab.records)
        self._do("save_host", {})
        assert len(self.slab.records) == before

    @precondition(lambda self: not self.poisoned)
    @rule(role=st.sampled_from(ALL), preserve=st.sampled_from([(), (Role.ROLLOUT,)]))
    def a_duplicate_request_moves_nothing(self, role: Role, preserve: tuple[Role, ...]) -> None:
        if role is Role.TRAIN:
            self.slab.onloads_due += 1
        asked = {"active": role, "preserve": preserve}
        expected = self.slab.planner.peek(role, preserve)
        start = len(self.slab.records)
        if self._do("planner.enter", asked) is not None:
            return
        assert self.slab.texts()[start:] == expected, "I12: peek told something else"
        before = len(self.slab.memory.operations)
        self._do("planner.enter", asked)
        assert len(self.slab.records) == start + len(expected), "I5: entered twice"
        assert len(self.slab.memory.operations) == before, "I5: entered twice"

    # --- failures -------------------------------------------------------------------------------

    @precondition(lambda self: not self.poisoned)
    @rule(event=st.sampled_from(["generate", "score", "extract", "step"]), action=ACTIONS)
    def a_phase_fails(self, event: str, action: tuple[str, dict[str, Any]]) -> None:
        """The engine sleeps afterwards, and the next window works."""
        error = self._do(*action, event=event)
        if isinstance(error, InjectedError) and event == "generate":
            asleep = self.slab.planner.parkable(Role.ROLLOUT)
            assert not (asleep and self.slab.planner.is_on_device(Role.ROLLOUT)), "I7: awake"

    @precondition(lambda self: not self.poisoned)
    @rule(
        action=ACTIONS,
        position=st.integers(0, 8),
        is_interrupt=st.booleans(),
        after_the_copy=st.booleans(),
        at_start=st.booleans(),
    )
    def a_move_fails(
        self,
        action: tuple[str, dict[str, Any]],
        position: int,
        is_interrupt: bool,
        after_the_copy: bool,
        at_start: bool,
    ) -> None:
        """All of the role is where it was, and the same request works the next time."""
        error = self._do(
            *action,
            faults=(position,),
            is_interrupt=is_interrupt,
            after_the_copy=after_the_copy,
            at_start=at_start,
        )
        self.poisoned = self._is_poisoned()  # where the fault met the undoing of a refused move
        if isinstance(error, OSError | KeyboardInterrupt) and not self.poisoned:
            self.check_states()
            self._check_ledger()
            again = self._do(*action)
            assert again is None or isinstance(again, ResidencyError), f"I7: {again}"

    @precondition(lambda self: not self.poisoned)
    @rule(action=ACTIONS, position=st.integers(1, 8), later=st.integers(1, 2), stops=st.booleans())
    def a_move_and_undoing_it_fail(
        self, action: tuple[str, dict[str, Any]], position: int, later: int, stops: bool
    ) -> None:
        """Where undoing failed, the run is poisoned; where there was nothing to undo, it is not."""
        self._do(*action, faults=(position, position + later), is_interrupt=stops)
        self.poisoned = self._is_poisoned()
        if not self.poisoned:
            self.check_states()

    @precondition(lambda self: self.poisoned)
    @rule(role=st.sampled_from(ALL), on_device=st.booleans())
    def whoever_is_poisoned_does_nothing_more(self, role: Role, on_device: bool) -> None:
        planner, before = self.slab.planner, len(self.slab.memory.operations)
        for request in (
            lambda: planner.enter(role),
            lambda: planner.make_room(role),
            lambda: planner.set(role, on_device),
        ):
            with pytest.raises(ResidencyError, match=r"could not be undone \(.*stuck"):
                request()
        assert len(self.slab.memory.operations) == before, "I7: moved although poisoned"

    def _is_poisoned(self) -> bool:
        return State.POISONED in self.slab.planner.snapshot().values()

    def _check_ledger(self) -> None:
        ledger, memory = self.slab.planner.ledger, self.slab.memory
        assert ledger.device_bytes == memory.used_bytes, "I7: the ledger is wrong"
        assert ledger.host_bytes == sum(memory.host_sizes.values()), "I7: the ledger is wrong"

    # --- invariants -----------------------------------------------------------------------------

    @invariant()
    def check_memory(self) -> None:
        budget, memory = self.slab.budget_bytes, self.slab.memory
        assert budget is None or memory.peak_bytes <= budget, "I1: over budget"
        both = self.slab.overlap_bytes
        assert memory.peak_of_both <= (both or 0), "I1: both sides do not fit"

    @invariant()
    def check_copies(self) -> None:
        memory, directory = self.slab.memory, self.slab.planner._directory
        for part in self._sound_parts(Parking.COPY):
            held = directory.host_version(part)
            if not part.is_resident:
                assert part.read() == part.newest, f"I4: {part.name} is stale on the host"
                assert held == part.version(), f"I4: {part.name} is of another version"
            elif part.version() != Version(None) and held == part.version():
                same = part.contents == memory.host[part.host_key]
                assert same, f"I3: two copies of {part.name} differ"

    @invariant()
    def check_transitions(self) -> None:
        new = slice(self.num_checked, None)
        for transition, used in zip(self.slab.records[new], self.slab.used_after[new], strict=True):
            for last in transition.moves[-1:]:
                late = _left_late(transition)
                assert last.device_bytes >= used + late, "I6: the ledger is wrong"
                assert late or last.device_bytes == used, "I6: the ledger is wrong"
            for move in transition.moves:
                assert move.source is not move.target, f"I5: {move.component} did not change"
                is_coming = move.target is State.RESIDENT
                assert is_coming == transition.to_device, f"I5: {move.component} went elsewhere"
        self.num_checked = len(self.slab.records)
        seqs = [transition.seq for transition in self.slab.records]
        assert seqs == list(range(1, len(seqs) + 1))
        if not self.poisoned:
            self._check_logged_bytes()

    def _check_logged_bytes(self) -> None:
        """Moments were not there at first, and were there when they appeared."""
        total = self.first_bytes + self.slab.all_parts["train.moments"].size
        for move in (move for t in self.slab.records for move in t.moves):
            part = self.slab.all_parts[move.component]
            if move.target is not State.RESIDENT:
                total -= move.moved.touched_bytes
            elif part.parking is Parking.DROP:
                total += part.size  # nothing is copied for it
            else:
                total += move.moved.num_bytes
        assert total == self.slab.memory.used_bytes, "I6: the log does not add up"

    @invariant()
    def check_states(self) -> None:
        if self.poisoned:
            return
        states = self.slab.planner.snapshot()
        for part in self._tracked_parts():
            away = State.PARKED if part.parking is Parking.COPY else State.DROPPED
            expected = State.RESIDENT if part.is_resident else away
            assert states[part.name] is expected, f"I7: {part.name} is not {states[part.name]}"
        for role in self.setup.tracked:
            is_claimed = self.slab.planner.is_on_device(role)
            assert not is_claimed or self.slab.is_whole(role), f"I7: {role} is in pieces"

    @invariant()
    def check_untracked(self) -> None:
        moved = {operation.split()[1] for operation in self.slab.memory.operations}
        idle = {p.name for r in ALL if r not in self.setup.tracked for p in self.slab.parts[r]}
        assert not moved & idle, "I8: an untracked component moved"

    @invariant()
    def check_trips(self) -> None:
        onloads = self.slab.texts().count("train onload")
        assert onloads <= self.slab.onloads_due, "I10: the trainer came more often than needed"

    @invariant()
    def check_frozen(self) -> None:
        parts = {part.host_key: part for part in self._tracked_parts() if part.is_frozen}
        for key, part in parts.items():
            allowed = 0 if key == "network" and self._starts_on_the_host() else part.size
            assert self.slab.memory.copied_out[key] <= allowed, f"I11: {part.name} crossed again"

    def _starts_on_the_host(self) -> bool:
        """An engine that is built asleep has left the base on the host."""
        is_shared = self.slab.parts[Role.TRAIN][0] is self.slab.parts[Role.ROLLOUT][0]
        return Role.ROLLOUT in self.setup.tracked and not is_shared

    def _tracked_parts(self) -> list[HeldPart]:
        return [part for role in self.setup.tracked for part in self.slab.parts[role]]

    def _sound_parts(self, parking: Parking) -> list[HeldPart]:
        states = self.slab.planner.snapshot()
        return [
            part
            for part in self._tracked_parts()
            if part.parking is parking and states[part.name] is not State.POISONED
        ]


def _play(
    slab: Slab, name: str, arguments: dict[str, Any], failures: dict[str, Any]
) -> BaseException | None:
    request: Any = slab
    for attribute in name.split("."):
        request = getattr(request, attribute)
    event = failures.get("event")
    slab.events.failing.update({event: InjectedError(event)} if event else {})
    error = KeyboardInterrupt("stuck") if failures.get("is_interrupt") else OSError("stuck")
    how = {name: failures.get(name, False) for name in ("after_the_copy", "at_start")}
    try:
        with slab.faults(*failures.get("faults", ()), error=error, **how):
            request(**arguments)
    except (InjectedError, OSError, KeyboardInterrupt, ResidencyError) as raised:
        return raised
    finally:
        slab.events.failing.clear()
    return None


def _watch_trainer(slab: Slab, operation: str) -> None:
    """I9: when the trainer comes, no reward that could have left is there."""
    reward = slab.parts[Role.REWARD]
    is_coming = operation == "in train.adapter" and Role.TRAIN in slab.setup.tracked
    if is_coming and slab.planner.parkable(Role.REWARD):
        # One that is on its way out may be there, where both fit (I1).
        there = [part for part in reward if part.is_resident]
        staying = [part.name for part in there if part.name not in slab.memory.leaving]
        assert not staying, "I9: beside a parkable reward"


def _left_late(transition: Transition) -> int:
    """Bytes that were still there when others had come."""
    is_late = transition.rule is MoveRule.OVERLAP and not transition.to_device
    return sum(move.moved.touched_bytes for move in transition.moves) if is_late else 0


def _plan_text(slab: Slab) -> list[str]:
    return [
        f"{t.text} ({t.cause}, {t.rule}): {move.component} {move.source} {move.target} {move.moved}"
        for t in slab.records
        for move in t.moves
    ]


def run_machine(planner: type[ResidencyPlanner]) -> None:
    machine = type("Machine", (ResidencyMachine,), {"planner_class": planner})
    run_state_machine_as_test(machine, settings=SETTINGS)


def test_the_twelve_invariants_hold():
    run_machine(ResidencyPlanner)


MUTANTS: Sequence[tuple[type[ResidencyPlanner], str]] = (
    (SkipsTheBudget, "I1: "),
    (LeavesOneBehind, "I[27]: "),
    (NeverCopiesAgain, "I[234]: "),
    (MovesAlways, "I(5|10): "),
    (LedgerThatNeverFrees, "I6: "),
    (ForgetsToUndo, "I[67]: "),
    (GoesOnWhenUndoingFails, "I[67]: "),
    (ParksBystanders, "I(8|11): "),
    (TrainsBesideTheReward, "I9: "),
    (BringsTheTrainerBack, "I10: "),
    (CopiesAlways, "I11: "),
    (OrderOfTheDay, "I12: "),
    (OverlapsWithoutRoom, "I1: "),
    (FreesBeforeAllIsThere, "was freed before|I[67]: "),
    (ForgetsToGiveBack, "I[57]: |was freed before"),
)


@pytest.mark.parametrize(
    ("mutant", "broken"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS]
)
def test_a_mutant_breaks_the_invariant_that_its_rule_is_for(mutant, broken):
    with pytest.raises(AssertionError, match=broken):
        run_machine(mutant)
