"""What is written down about a move."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from unirl.core.components import Moved
from unirl.residency.directory import State
from unirl.residency.policy import Role


class MoveRule(Enum):
    """In which order memory is freed and taken."""

    RELEASE_FIRST = "release first"
    OVERLAP = "overlap"
    """What leaves and what comes are copied at the same time, and both are there meanwhile."""


@dataclass(frozen=True)
class ComponentMove:
    """One component that left or came."""

    component: str
    source: State
    target: State
    moved: Moved
    seconds: float
    version: str
    """Of the contents that moved; `unknown` for those that anything may have written."""
    device_bytes: int
    """What all components held on the device afterwards; where it left while others came, what
    they held together."""
    host_bytes: int

    @property
    def was_tensors(self) -> bool:
        """Whether it lay in the device's tensors, not in something that builds itself."""
        return State.PARKED in (self.source, self.target)


@dataclass(frozen=True)
class Transition:
    """A role that left or came: `train offload`."""

    seq: int
    """Number of the transition in this process."""
    role: Role
    to_device: bool
    cause: str
    """The request that led to it, e.g. `enter rollout`."""
    moves: tuple[ComponentMove, ...]
    """In order; none where the role has nothing of its own, or all of it stays."""
    seconds: float
    rule: MoveRule = MoveRule.RELEASE_FIRST
    is_loan: bool = False
    """Only components that are borrowed for a moment; the role as a whole stays where it is."""

    @property
    def text(self) -> str:
        move = f"{self.role.value} {'onload' if self.to_device else 'offload'}"
        names = ", ".join(move.component for move in self.moves)
        return f"{move} of {names}" if self.is_loan else move

    @property
    def moved(self) -> Moved:
        return Moved(
            sum(move.moved.num_bytes for move in self.moves),
            sum(move.moved.dropped_bytes for move in self.moves),
        )
