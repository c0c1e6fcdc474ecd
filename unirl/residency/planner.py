"""The only owner of "who is on the device": every move of weights in a run is issued here.

Callers say which role works next (`enter`) or change one role alone (`set`). A role is a list of
components, and one component may serve several roles. The planner moves exactly what changes
something: off the device what nobody needs and no rule keeps, then onto it what the next role
lacks. How a move is made, and undone, is in `transaction`; how roles leave while another comes, in
`handoff`; what must be copied, in `directory`.
Pure: no torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice

from unirl.core.components import Movable, Parking
from unirl.core.errors import ResidencyError
from unirl.residency.directory import Directory, State
from unirl.residency.handoff import OverlappedHandoff
from unirl.residency.ledger import Ledger
from unirl.residency.policy import KeepRule, Role
from unirl.residency.transaction import Transaction
from unirl.residency.transition import MoveRule, Transition
from unirl.residency.watch import DeviceWatch

logger = logging.getLogger("unirl.residency")

INITIALLY_ON_DEVICE = {Role.TRAIN: True, Role.ROLLOUT: False, Role.REWARD: True}
"""Roles are built on the device, an engine asleep."""


def log_transitions(transitions: Sequence[Transition]) -> None:
    """One line for those of one request."""
    # Empty moves (an engine that shares the train stack's weights) go to the log file only.
    level = logging.INFO if any(t.moved.touched_bytes for t in transitions) else logging.DEBUG
    logger.log(level, "lifecycle residency: %s", ", ".join(t.text for t in transitions))


@dataclass(frozen=True)
class _Move:
    role: Role
    to_device: bool


class ResidencyPlanner:
    """Tracks which roles are on the device and moves their components.

    A role without an entry in `components` is *untracked*: it does not share this slab, so it is
    never moved, but entering it still parks the others. After a failed move the role's state is
    what it was before, so the request can be repeated.
    """

    def __init__(
        self,
        rule: KeepRule,
        components: Mapping[Role, Sequence[Movable]],
        record: Callable[[Transition], None],
        wait_for_ranks: Callable[[], None],
        bystanders: Sequence[Movable] = (),
        budget_bytes: int | None = None,
        overlap_bytes: int | None = None,
        announce: Callable[[Sequence[Transition]], None] = log_transitions,
        allocated_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`wait_for_ranks` is called after each transition: no rank uses memory that another still
        fills. `bystanders` take memory of the slab and are accounted, whether they move or not.
        `overlap_bytes`: what components may take while some leave and others come; None: what
        leaves is released first. `announce` is told of the transitions that one request led to."""
        self._rule = rule
        self._components = {role: tuple(parts) for role, parts in components.items()}
        self._record = record
        self._wait_for_ranks = wait_for_ranks
        self._announce = announce
        self._watch = DeviceWatch(allocated_bytes)
        self._on_device = {role: INITIALLY_ON_DEVICE[role] for role in self._components}
        self._seq = 0
        self._parts = {p.name: p for parts in self._components.values() for p in parts}
        self._accounted = {p.name: p for p in [*self._parts.values(), *bystanders]}.values()
        self._directory = Directory(self._accounted)
        self.ledger = Ledger(budget_bytes)
        self.ledger.read(self._accounted)
        self._transaction = Transaction(self._directory, self.ledger)
        self._handoff = OverlappedHandoff(
            self._directory, self.ledger, self._transaction, overlap_bytes
        )

    # --- questions ------------------------------------------------------------------------------

    def parkable(self, role: Role) -> bool:
        """Whether the role may leave the device while idle: it is tracked and not pinned."""
        return role in self._components and not self._rule.is_pinned(role)

    def is_on_device(self, role: Role) -> bool:
        """Whether a tracked role is on the device now; untracked roles always are, elsewhere."""
        return self._on_device.get(role, True)

    @property
    def plan(self) -> str:
        """What decides all moves of a run; ranks with equal plans make equal moves."""
        return f"{self._rule.text}; moved: {', '.join(role.value for role in self._components)}"

    def snapshot(self) -> Mapping[str, State]:
        """Where every component is."""
        return {name: self._directory.state(part) for name, part in self._parts.items()}

    def peek(self, active: Role, preserve: Collection[Role] = ()) -> list[str]:
        """The transitions that `enter(active, preserve)` would make now; nothing moves."""
        moves = [*self._idle(active, preserve), _Move(active, True)]
        changing = [move for move in moves if self._changes_something(move, active)]
        return [f"{m.role.value} {'onload' if m.to_device else 'offload'}" for m in changing]

    def require_live(self, role: Role, besides: str = "") -> None:
        """Raise ResidencyError unless every component of the role is on the device with contents.

        `besides`: who is about to write components that may be void until then, e.g. `push`.
        """
        missing = self._directory.missing(self._components.get(role, ()), besides)
        if missing:
            raise ResidencyError(f"the {role.value} role cannot work: {'; '.join(missing)}")

    # --- requests -------------------------------------------------------------------------------

    def enter(self, active: Role, preserve: Collection[Role] = ()) -> None:
        """Make room for `active`, then bring it onto the device.

        Parks every parkable role but `active` and those in `preserve`, also when `active` itself
        is untracked.
        """
        self._rule.enter(active)
        if not self._exchange(active, preserve):
            self.make_room(active, preserve)
            self._apply([_Move(active, True)], f"enter {active.value}", active)
        self._watch.entered(active, self.ledger.device_bytes)

    def make_room(self, active: Role, preserve: Collection[Role] = ()) -> None:
        """The first half of `enter`: for a role that is there already and needs its space."""
        self._apply(self._idle(active, preserve), f"enter {active.value}", active)

    def set(self, role: Role, on_device: bool) -> None:
        """Move one role and nothing else; a pinned role is not taken off the device."""
        self._apply([_Move(role, on_device)], f"set {role.value}", None)

    @contextmanager
    def borrowed(self, cause: str) -> Iterator[None]:
        """Have the components on the device that are there only on demand, and park them after."""
        self._lend([p for p in self._on_demand() if not p.is_resident], cause, to_device=True)
        try:
            yield
        finally:
            self._lend([p for p in self._on_demand() if p.is_resident], cause, to_device=False)

    # --- how requests become moves --------------------------------------------------------------

    def _idle(self, active: Role, preserve: Collection[Role]) -> list[_Move]:
        return [_Move(role, False) for role in Role if role is not active and role not in preserve]

    def _apply(self, moves: Sequence[_Move], cause: str, active: Role | None) -> None:
        """Run the moves that change something; all are tried, then the first error is raised."""
        self._transaction.require_sound()
        done: list[Transition] = []
        errors: list[Exception] = []
        for move in moves:
            if not self._transaction.is_sound:
                break
            if not self._changes_something(move, active):
                continue
            try:
                done.append(self._run(move, cause, active))
            except Exception as error:
                error.add_note(f"while moving: {move.role.value}, cause: {cause}")
                errors.append(error)
        if done:
            self._announce(done)
        if errors:
            for later in errors[1:]:
                errors[0].add_note(f"also failed: {later}")
            raise errors[0]

    def _exchange(self, active: Role, preserve: Collection[Role]) -> bool:
        """Let roles leave while `active` comes; False, with nothing moved, where it does not pay or
        both sides do not fit."""
        self._transaction.require_sound()
        comes = self._changes_something(_Move(active, True), active)
        if not (comes and self._handoff.is_asked_for):
            return False
        self.ledger.read(self._accounted)
        leaving, coming = self._leaving(active, preserve), self._to_bring(active)
        if not self._handoff.pays([*chain(*leaving.values())], coming):
            return False
        self._hand_over(leaving, active, coming)
        return True

    def _leaving(self, active: Role, preserve: Collection[Role]) -> dict[Role, list[Movable]]:
        """What would be parked for `active`; nothing moves."""
        leaving: dict[Role, list[Movable]] = {}
        before = dict(self._on_device)
        try:
            for move in self._idle(active, preserve):
                if self._changes_something(move, active):
                    leaving[move.role] = self._to_park(move.role, active)
                    self._on_device[move.role] = False  # as it would be for the next role
        finally:
            self._on_device = before
        return leaving

    def _hand_over(
        self, leaving: Mapping[Role, Sequence[Movable]], active: Role, coming: Sequence[Movable]
    ) -> None:
        """Transitions whose moves overlap: accounted, recorded and announced as they always are."""
        cause = f"enter {active.value}"
        try:
            handed = self._handoff.run([*chain(*leaving.values())], coming, self._watch.before_move)
        except Exception as error:
            error.add_note(f"while moving: {', '.join(r.value for r in leaving)}, cause: {cause}")
            raise
        left = iter(handed.left)
        moves = {role: tuple(islice(left, len(parts))) for role, parts in leaving.items()}
        transitions = [
            Transition(
                seq=self._seq + number,
                role=role,
                to_device=role is active,
                cause=cause,
                moves=those,
                seconds=sum(move.seconds for move in those),
                rule=MoveRule.OVERLAP,
            )
            for number, (role, those) in enumerate({**moves, active: handed.came}.items(), start=1)
        ]
        self._seq += len(transitions)
        self._watch.after_moves(transitions, handed.allocated_bytes)
        for transition in transitions:
            self._note(transition)
        self._announce(transitions[:-1])
        self._announce(transitions[-1:])

    def _changes_something(self, move: _Move, active: Role | None) -> bool:
        role = move.role
        if role not in self._components:
            return False
        if move.to_device:
            return not self._on_device[role]
        if self._rule.is_pinned(role) or self._stays_whole(role):
            return False
        return self._on_device[role] or bool(self._to_park(role, active))

    def _run(self, move: _Move, cause: str, active: Role | None) -> Transition:
        role = move.role
        parts = self._to_bring(role) if move.to_device else self._to_park(role, active)
        return self._carry(role, parts, cause, to_device=move.to_device, is_loan=False)

    def _carry(
        self, role: Role, parts: Sequence[Movable], cause: str, *, to_device: bool, is_loan: bool
    ) -> Transition:
        """One transition: moved, accounted and recorded."""
        self.ledger.read(self._accounted)
        allocated = self._watch.before_move()
        started = time.perf_counter()
        moves = self._transaction.run(parts, to_device=to_device)
        seconds = time.perf_counter() - started
        self._seq += 1
        transition = Transition(self._seq, role, to_device, cause, moves, seconds, is_loan=is_loan)
        self._watch.after_moves([transition], allocated)
        self._note(transition)
        return transition

    def _note(self, transition: Transition) -> None:
        """The roles' states, the record, and the other ranks."""
        if not transition.is_loan:
            self._on_device[transition.role] = transition.to_device
        self._record(transition)
        self._wait_for_ranks()

    def _on_demand(self) -> list[Movable]:
        return [part for part in self._accounted if part.on_demand]

    def _lend(self, parts: Sequence[Movable], cause: str, *, to_device: bool) -> None:
        if parts:
            self._transaction.require_sound()
            loan = self._carry(Role.TRAIN, parts, cause, to_device=to_device, is_loan=True)
            self._announce([loan])

    def _to_bring(self, role: Role) -> list[Movable]:
        return [p for p in self._components[role] if not (p.is_resident or p.on_demand)]

    def _to_park(self, role: Role, active: Role | None) -> list[Movable]:
        """The role's components that nothing holds here: no other role that works, no rule."""
        others = [r for r, there in self._on_device.items() if (there or r is active)]
        needed = {p.name for r in others if r is not role for p in self._components[r]}
        return [
            part
            for part in self._components[role]
            if part.is_resident
            and part.parking is not Parking.KEEP
            and part.name not in needed
            and (part.on_demand or not self._rule.keeps(role, part.name))
        ]

    def _stays_whole(self, role: Role) -> bool:
        free = [p for p in self._components[role] if not p.on_demand]
        parts = [part for part in free if part.parking is not Parking.KEEP]
        return bool(parts) and all(self._rule.keeps(role, part.name) for part in parts)
