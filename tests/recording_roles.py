"""Roles that only write down what was asked of them, for tests of who is on the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from unirl.core.components import VOID, Movable, Moved, Parking, StartedMove, Version, Void
from unirl.distributed.ranks import OneRank
from unirl.residency.planner import INITIALLY_ON_DEVICE, ResidencyPlanner
from unirl.residency.policy import ResidencyPolicy, Role
from unirl.residency.transition import Transition


class RecordingPart:
    """A component of `size` bytes; `writes` is raised by whoever writes it, None loses it."""

    def __init__(
        self,
        name: str,
        size: int = 10,
        *,
        is_resident: bool = True,
        parking: Parking = Parking.COPY,
        written_by: str = "nobody",
        host_key: str = "",
        on_move: Callable[[RecordingPart, str], None] = lambda part, move: None,
    ) -> None:
        self.name = name
        self.size = size
        self.parking = parking
        self.written_by = written_by
        self.on_demand = False
        self.host_key = host_key or name
        self.is_resident = is_resident
        self.writes: int | None = 0
        self.moved: list[str] = []
        """Moves as they were asked for: `copy`, `drop` or `in`."""
        self._on_move = on_move
        self._host_bytes = 0 if is_resident else size

    def version(self) -> Version | Void:
        return VOID if self.writes is None else Version(self.writes)

    def num_bytes(self) -> int:
        return self.size

    def host_bytes(self) -> int:
        return self._host_bytes

    def park(self, *, copy: bool) -> Moved:
        self._on_move(self, "offload")
        assert self.is_resident, f"{self.name} is not there"
        self.is_resident = False
        self.moved.append("copy" if copy else "drop")
        if copy:
            self._host_bytes = self.size
        return Moved(self.size) if copy else Moved(0, self.size)

    def unpark(self) -> Moved:
        self._on_move(self, "onload")
        assert not self.is_resident, f"{self.name} is there"
        self.is_resident = True
        self.moved.append("in")
        return Moved(self.size)

    def start_park(self, *, copy: bool) -> StartedMove:
        return StartedMove.at_once(lambda: self.park(copy=copy))

    def start_unpark(self) -> StartedMove:
        return StartedMove.at_once(self.unpark)


@dataclass
class RecordingRoles:
    """The slab as the roles see it: one component each; what moved, and who is there now."""

    tracked: Collection[Role] = tuple(Role)
    moves: list[str] = field(default_factory=list)
    """Finished moves, like `train offload`."""
    on_device: dict[Role, bool] = field(default_factory=lambda: dict(INITIALLY_ON_DEVICE))
    failing: set[str] = field(default_factory=set)
    """Moves that raise."""

    def components(self) -> Mapping[Role, Sequence[Movable]]:
        def part(role: Role) -> RecordingPart:
            def on_move(part: RecordingPart, move: str) -> None:
                text = f"{role.value} {move}"
                if text in self.failing:
                    raise OSError(f"{text} failed")
                self.moves.append(text)
                self.on_device[role] = move == "onload"

            there = INITIALLY_ON_DEVICE[role]
            return RecordingPart(f"{role.value}.weights", is_resident=there, on_move=on_move)

        return {role: [part(role)] for role in self.tracked}

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
    return ResidencyPlanner(policy(*parked), roles.components(), record, OneRank().barrier)
