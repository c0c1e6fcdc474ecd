"""The only owner of "who is on the device": every move of weights in a run is issued here.

Callers say which role works next (`enter`) or change one role alone (`set`); the planner issues
exactly the moves that change something, off the device before onto it. Pure: no torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from unirl.core.components import Moved
from unirl.residency.policy import ResidencyPolicy, Role

logger = logging.getLogger("unirl.residency")

INITIALLY_ON_DEVICE = {Role.TRAIN: True, Role.ROLLOUT: False, Role.REWARD: True}
"""Roles are built on the device, an engine asleep."""


@dataclass(frozen=True)
class RoleMoves:
    """How a role's weights are moved."""

    onload: Callable[[], Moved]
    offload: Callable[[], Moved]


@dataclass(frozen=True)
class Transition:
    """One move that changed something."""

    seq: int
    role: Role
    to_device: bool
    cause: str
    """The request that led to it, e.g. `enter rollout`."""
    moved: Moved
    seconds: float

    @property
    def text(self) -> str:
        return f"{self.role.value} {'onload' if self.to_device else 'offload'}"


@dataclass(frozen=True)
class _Move:
    role: Role
    to_device: bool


class ResidencyPlanner:
    """Tracks which roles are on the device and moves them.

    A role without moves is *untracked*: it does not share this slab, so it is never moved, but
    entering it still parks the others. After a failed move the role's state is what it was before,
    so the request can be repeated.
    """

    def __init__(
        self,
        policy: ResidencyPolicy,
        moves: Mapping[Role, RoleMoves],
        record: Callable[[Transition], None],
        wait_for_ranks: Callable[[], None],
    ) -> None:
        """`wait_for_ranks` is called after each move: no rank uses memory that another still
        fills."""
        self._policy = policy
        self._moves = dict(moves)
        self._record = record
        self._wait_for_ranks = wait_for_ranks
        self._on_device = {role: INITIALLY_ON_DEVICE[role] for role in self._moves}
        self._seq = 0

    def parkable(self, role: Role) -> bool:
        """Whether the role leaves the device while idle: it is tracked and not pinned."""
        return role in self._moves and not self._policy.is_pinned(role)

    def is_on_device(self, role: Role) -> bool:
        """Whether a tracked role is on the device now; untracked roles always are, elsewhere."""
        return self._on_device.get(role, True)

    @property
    def plan(self) -> str:
        """What decides all moves of a run; ranks with equal plans make equal moves."""
        return ", ".join(
            f"{role.value} {'parks' if self.parkable(role) else 'stays'}" for role in self._moves
        )

    def enter(self, active: Role, preserve: Collection[Role] = ()) -> None:
        """Make room for `active`, then bring it onto the device.

        Parks every parkable role but `active` and those in `preserve`, also when `active` itself
        is untracked.
        """
        idle = [role for role in Role if role is not active and role not in preserve]
        cause = f"enter {active.value}"
        self._apply([_Move(role, False) for role in idle], cause)
        self._apply([_Move(active, True)], cause)

    def set(self, role: Role, on_device: bool) -> None:
        """Move one role and nothing else; a pinned role is not taken off the device."""
        self._apply([_Move(role, on_device)], f"set {role.value}")

    def _apply(self, moves: Sequence[_Move], cause: str) -> None:
        """Run the moves that change something; all are tried, then the first error is raised."""
        done: list[Transition] = []
        errors: list[Exception] = []
        for move in filter(self._changes_something, moves):
            try:
                done.append(self._run(move, cause))
            except Exception as error:
                error.add_note(f"while moving: {move.role.value}, cause: {cause}")
                errors.append(error)
        if done:
            # Empty moves (an engine that shares the train stack's weights) go to the log file only.
            level = logging.INFO if any(t.moved.touched_bytes for t in done) else logging.DEBUG
            logger.log(level, "lifecycle residency: %s", ", ".join(t.text for t in done))
        if errors:
            for later in errors[1:]:
                errors[0].add_note(f"also failed: {later}")
            raise errors[0]

    def _changes_something(self, move: _Move) -> bool:
        if move.role not in self._moves or self._on_device[move.role] == move.to_device:
            return False
        return move.to_device or not self._policy.is_pinned(move.role)

    def _run(self, move: _Move, cause: str) -> Transition:
        action = self._moves[move.role]
        started = time.perf_counter()
        moved = action.onload() if move.to_device else action.offload()
        seconds = time.perf_counter() - started
        self._on_device[move.role] = move.to_device
        self._seq += 1
        transition = Transition(self._seq, move.role, move.to_device, cause, moved, seconds)
        self._record(transition)
        self._wait_for_ranks()
        return transition
