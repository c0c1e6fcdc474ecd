"""Properties of the planner under any policy, any tracked roles and any sequence of requests.

The same properties are checked on planners with one rule taken away, which must break them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations

import pytest
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
from recording_roles import RecordingRoles, policy

from unirl.core.components import Movable
from unirl.core.errors import ResidencyError
from unirl.residency.planner import INITIALLY_ON_DEVICE, ResidencyPlanner, _Move
from unirl.residency.policy import Role
from unirl.residency.transition import Transition

ROLES = st.sampled_from(list(Role))
SUBSETS = st.sampled_from([set(c) for n in range(4) for c in combinations(Role, n)])
SETTINGS = settings(
    max_examples=100,
    stateful_step_count=20,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],
)


class PlannerMachine(RuleBasedStateMachine):
    """Requests as the loop makes them and as it should not, with failures in between."""

    planner_class: type[ResidencyPlanner] = ResidencyPlanner

    @initialize(parked=SUBSETS, untracked=SUBSETS)
    def build(self, parked: set[Role], untracked: set[Role]) -> None:
        self.parked = parked
        self.tracked = [role for role in Role if role not in untracked]
        self.roles = RecordingRoles(self.tracked)
        self.records: list[Transition] = []
        self.log: list[str] = []
        self.planner = self.planner_class(
            policy(*parked), self.roles.components(), self.records.append, lambda: None
        )

    def _request(self, request) -> list[str]:
        """Run one request and return its moves, checking that each changed something."""
        before = dict(self.roles.on_device)
        self.roles.take()
        try:
            request()
        finally:
            moves = self.roles.take()
            self.log += moves
        state = before
        for move in moves:
            name, direction = move.split()
            role = Role(name)
            assert state[role] != (direction == "onload"), f"{move} changed nothing"
            state[role] = direction == "onload"
            assert direction == "onload" or role in self.parked, f"pinned: {move}"
        return moves

    def _must_leave(self, active: Role, preserve: Collection[Role]) -> set[Role]:
        return {r for r in self.tracked if r in self.parked and r is not active} - set(preserve)

    @rule(active=ROLES, preserve=SUBSETS)
    def enter(self, active: Role, preserve: set[Role]) -> None:
        there_before = [role for role in self.tracked if self.roles.on_device[role]]
        moves = self._request(lambda: self.planner.enter(active, preserve))
        leaving = self._must_leave(active, preserve)
        assert not any(self.roles.on_device[role] for role in leaving)
        assert active not in self.tracked or self.roles.on_device[active]
        stays = {r for r in there_before if r not in leaving}
        assert all(self.roles.on_device[role] for role in stays), "more was moved than needed"
        onloads = [move.endswith("onload") for move in moves]
        assert onloads == sorted(onloads), "something came in before something went out"

    @rule(role=ROLES, on_device=st.booleans())
    def set(self, role: Role, on_device: bool) -> None:
        others = {r: there for r, there in self.roles.on_device.items() if r is not role}
        self._request(lambda: self.planner.set(role, on_device))
        assert others == {r: t for r, t in self.roles.on_device.items() if r is not role}
        if role in self.tracked and (on_device or role in self.parked):
            assert self.roles.on_device[role] == on_device

    @rule(active=ROLES, preserve=SUBSETS)
    def the_same_request_twice_moves_nothing(self, active: Role, preserve: set[Role]) -> None:
        self._request(lambda: self.planner.enter(active, preserve))
        assert self._request(lambda: self.planner.enter(active, preserve)) == []

    @rule(active=ROLES, failing=st.sampled_from(["onload", "offload"]), victim=ROLES)
    def enter_with_a_failure(self, active: Role, failing: str, victim: Role) -> None:
        """After the failure the same request does what it would have done."""
        self.roles.failing = {f"{victim.value} {failing}"}
        moves_before = len(self.log)
        try:
            self._request(lambda: self.planner.enter(active))
        except OSError:
            came_in = f"{active.value} onload" in self.log[moves_before:]
            assert not came_in, "came in although another role could not leave"
        self.planner_and_roles_agree()
        self.roles.failing = set()
        self.enter(active, set())

    @precondition(lambda self: Role.REWARD in self.tracked and Role.TRAIN in self.tracked)
    @rule()
    def the_trainer_is_never_beside_a_parkable_reward(self) -> None:
        self._request(lambda: self.planner.enter(Role.TRAIN))
        if Role.REWARD in self.parked:
            assert not self.roles.on_device[Role.REWARD]

    @precondition(lambda self: self.parked >= set(Role) and set(self.tracked) == set(Role))
    @rule()
    def all_parked_rollout_and_step(self) -> None:
        """In a whole window the trainer comes directly after the reward left."""
        self._request(lambda: self.planner.enter(Role.ROLLOUT))
        self._request(lambda: self.planner.set(Role.ROLLOUT, on_device=False))
        self._request(lambda: self.planner.enter(Role.REWARD))
        moves = self._request(lambda: self.planner.enter(Role.TRAIN))
        assert moves == ["reward offload", "train onload"]

    @invariant()
    def planner_and_roles_agree(self) -> None:
        for role in self.tracked:
            assert self.planner.is_on_device(role) == self.roles.on_device[role]
        for role in set(Role) - set(self.tracked):
            assert self.roles.on_device[role] == INITIALLY_ON_DEVICE[role]
        assert [t.text for t in self.records] == self.log
        assert [t.seq for t in self.records] == list(range(1, len(self.log) + 1))


def run_machine(planner: type[ResidencyPlanner]) -> None:
    machine = type("Machine", (PlannerMachine,), {"planner_class": planner})
    run_state_machine_as_test(machine, settings=SETTINGS)


def test_the_planner_keeps_its_promises():
    run_machine(ResidencyPlanner)


# --- planners with a rule taken away --------------------------------------------------------------


class MovesAlways(ResidencyPlanner):
    """Loads and parks without looking whether that changes anything (public issue UniRL#429)."""

    def _changes_something(self, move: _Move, active: Role | None) -> bool:
        pinned = self._rule.is_pinned(move.role)
        return move.role in self._components and (move.to_device or not pinned)

    def _to_bring(self, role: Role) -> list[Movable]:
        return list(self._components[role])


class ForgetsUntrackedActive(ResidencyPlanner):
    """Skips the whole request when the active role does not share the slab."""

    def enter(self, active: Role, preserve: Collection[Role] = ()) -> None:
        if active in self._components:
            super().enter(active, preserve)


class OnBeforeOff(ResidencyPlanner):
    """Brings the active role in before the others left."""

    def enter(self, active: Role, preserve: Collection[Role] = ()) -> None:
        self.set(active, on_device=True)
        super().enter(active, preserve)


class IgnoresPins(ResidencyPlanner):
    def _changes_something(self, move: _Move, active: Role | None) -> bool:
        return move.role in self._components and self._on_device[move.role] != move.to_device

    def _to_park(self, role: Role, active: Role | None) -> list[Movable]:
        return [part for part in self._components[role] if part.is_resident]


class IgnoresPreserve(ResidencyPlanner):
    def enter(self, active: Role, preserve: Collection[Role] = ()) -> None:
        super().enter(active)


class StateBeforeSuccess(ResidencyPlanner):
    """Believes in a move before it was made."""

    def _run(self, move: _Move, cause: str, active: Role | None) -> Transition:
        self._on_device[move.role] = move.to_device
        return super()._run(move, cause, active)


class GoesOnAfterAFailedOffload(ResidencyPlanner):
    def enter(self, active: Role, preserve: Collection[Role] = ()) -> None:
        idle = [role for role in Role if role is not active and role not in preserve]
        moves = [*(_Move(role, False) for role in idle), _Move(active, True)]
        self._apply(moves, f"enter {active.value}", active)


class ParksTooMuch(ResidencyPlanner):
    """Parks the active role for a fresh start."""

    def enter(self, active: Role, preserve: Collection[Role] = ()) -> None:
        self.set(active, on_device=False)
        super().enter(active, preserve)


MUTANTS: Sequence[type[ResidencyPlanner]] = (
    MovesAlways,
    ForgetsUntrackedActive,
    OnBeforeOff,
    IgnoresPins,
    IgnoresPreserve,
    StateBeforeSuccess,
    GoesOnAfterAFailedOffload,
    ParksTooMuch,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planner_without_one_of_the_rules_is_caught(mutant):
    with pytest.raises((AssertionError, ResidencyError, BaseExceptionGroup)) as caught:
        run_machine(mutant)
    errors = getattr(caught.value, "exceptions", (caught.value,))
    assert all(isinstance(error, (AssertionError, ResidencyError)) for error in errors)
