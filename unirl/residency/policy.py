"""What stays on the device while it is idle: one choice per role, or a rule per component."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from unirl.config.schema import RunConfig


class Role(Enum):
    """The three users of a slab's memory."""

    TRAIN = "train"
    ROLLOUT = "rollout"
    REWARD = "reward"


class KeepRule(Protocol):
    """Answers the planner's one question about idle weights: do they stay?"""

    def enter(self, role: Role) -> None:
        """`role` works next; what follows is asked about the time from now on."""

    def is_pinned(self, role: Role) -> bool:
        """Whether the role never leaves the device in the whole run."""
        ...

    def keeps(self, role: Role, component: str) -> bool:
        """Whether this component stays until it is needed again, although `role` is idle."""
        ...

    @property
    def text(self) -> str:
        """All of the rule in one line: ranks whose lines are equal decide alike."""
        ...


@dataclass(frozen=True)
class ResidencyPolicy:
    """One choice per role: resident roles stay while they are idle, the others are parked."""

    train_resident: bool
    rollout_resident: bool
    reward_resident: bool

    @classmethod
    def of(cls, config: RunConfig) -> ResidencyPolicy:
        """What the residency keys say, or what null stands for."""
        resident = config.resident
        return cls(resident["train"], resident["rollout"], resident["reward"])

    def enter(self, role: Role) -> None:
        return

    def is_pinned(self, role: Role) -> bool:
        match role:
            case Role.TRAIN:
                return self.train_resident
            case Role.ROLLOUT:
                return self.rollout_resident
            case Role.REWARD:
                return self.reward_resident

    def keeps(self, role: Role, component: str) -> bool:
        return self.is_pinned(role)

    @property
    def text(self) -> str:
        return ", ".join(f"{r.value} {'stays' if self.is_pinned(r) else 'parks'}" for r in Role)
