"""One residency choice per role."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """The three users of a slab's memory."""

    TRAIN = "train"
    ROLLOUT = "rollout"
    REWARD = "reward"


@dataclass(frozen=True)
class ResidencyPolicy:
    """Which roles stay on the device while they are idle; the others are parked on the host."""

    train_resident: bool
    rollout_resident: bool
    reward_resident: bool

    def is_pinned(self, role: Role) -> bool:
        match role:
            case Role.TRAIN:
                return self.train_resident
            case Role.ROLLOUT:
                return self.rollout_resident
            case Role.REWARD:
                return self.reward_resident
