"""Roles that only write down what was asked of them, for tests of who is on the device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from unirl.core.components import Moved
from unirl.distributed.ranks import OneRank
from unirl.residency.planner import INITIALLY_ON_DEVICE, ResidencyPlanner, RoleMoves, Transition
from unirl.residency.policy import ResidencyPolicy, Role


@dataclass
class RecordingRoles:
    """The slab as the roles see it: what moved, and who is there now."""

    tracked: Collection[Role] = tuple(Role)
    moves: list[str] = field(default_factory=list)
    """Finished moves, like `train offload`."""
    on_device: dict[Role, bool] = field(default_factory=lambda: dict(INITIALLY_ON_DEVICE))
    failing: set[str] = field(default_factory=set)
    """Moves that raise."""

    def role_moves(self) -> Mapping[Role, RoleMoves]:
        def action(role: Role, to_device: bool):
            def run() -> Moved:
                text = f"{role.value} {'onload' if to_device else 'offload'}"
                if text in self.failing:
                    raise OSError(f"{text} failed")
                self.moves.append(text)
                self.on_device[role] = to_device
                return Moved(10)

            return run

        return {role: RoleMoves(action(role, True), action(role, False)) for role in self.tracked}

    def take(self) -> list[str]:
        """Moves since the last call."""
        taken, self.moves = self.moves, []
        return taken


def policy(*parked: Role) -> ResidencyPolicy:
    """Every role resident but those in `parked`."""
    return ResidencyPolicy(
        train_resident=Role.TRAIN not in parked,
        rollout_resident=Role.ROLLOUT not in parked,
        reward_resident=Role.REWARD not in parked,
    )


def make_planner(
    roles: RecordingRoles, parked: Sequence[Role], records: list[Transition] | None = None
) -> ResidencyPlanner:
    record = (lambda transition: None) if records is None else records.append
    return ResidencyPlanner(policy(*parked), roles.role_moves(), record, OneRank().barrier)
