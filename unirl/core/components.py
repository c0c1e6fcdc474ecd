"""What a role holds on the device, and how one such thing is moved. No torch.

A role *declares* its components (`TensorComponent`, `RebuiltComponent`). `memory.movers` makes each
of them `Movable`, and the residency planner decides when it moves and whether it must be copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

FROZEN = 0
"""The version of weights that are never written."""
NETWORK_BASE = "network.base"
"""Host key of the denoising network's frozen weights: the train stack's and an engine's are
equal."""


class Parking(Enum):
    """What becomes of a component's contents while it is off the device."""

    COPY = "copy"
    """The host keeps a copy, made only when the device's contents are newer than it."""
    REBUILD = "rebuild"
    """Nothing is copied: it is built again from what the host keeps anyway, e.g. a file."""
    DROP = "drop"
    """Lost: it comes back without contents and must be written before it is used."""
    KEEP = "keep"
    """It stays on the device although its role is parked."""


@dataclass(frozen=True)
class Version:
    """Which state of the weights a copy holds: equal versions mean equal bytes."""

    number: int | None
    """Raised with every write; None where there is no way to know, so every look counts as new."""

    def __str__(self) -> str:
        return "unknown" if self.number is None else str(self.number)


class Void(Enum):
    """The version of a copy without contents: memory that was lost or never filled."""

    VOID = "VOID"

    def __str__(self) -> str:
        return self.value


VOID = Void.VOID


@dataclass(frozen=True, eq=False)
class TensorComponent:
    """Tensors that live on the device while their role works."""

    name: str
    tensors: Callable[[], Iterable[Tensor]]
    """The tensors there are now: optimizer moments appear with the first step."""
    version: Callable[[], int | None]
    """Changes whenever the tensors were written; None: unknown, so parking always copies."""
    written_by: str = "nobody"
    """For tables: `nobody`, `optimizer step`, `push`, `forward`."""
    parking: Parking = Parking.COPY
    on_demand: bool = False
    """On the device only while somebody borrows it (`ResidencyPlanner.borrowed`), not through the
    whole phase of its role."""
    host_key: str = ""
    """Components with one key hold the same values in the same order and share one host copy;
    the name where it is empty."""


@dataclass(frozen=True, eq=False)
class RebuiltComponent:
    """Something that frees itself and is built again from what the host keeps."""

    name: str
    drop: Callable[[], int]
    """Free the device side; returns the bytes given up."""
    rebuild: Callable[[], int]
    """Build it again; returns the bytes brought in."""
    num_bytes: Callable[[], int]
    """What it holds on the device when it is there."""
    written_by: str = field(default="nobody", init=False)


Component = TensorComponent | RebuiltComponent


@dataclass(frozen=True)
class Moved:
    """Bytes that one move really moved, one way."""

    num_bytes: int
    """Copied between host and device, or built anew on the device."""
    dropped_bytes: int = 0
    """Freed without a copy: the host already had them, or they are not needed."""

    @property
    def touched_bytes(self) -> int:
        return self.num_bytes + self.dropped_bytes


@dataclass(frozen=True)
class StartedMove:
    """A move whose copies are on their way; until it is finished its component is where it was."""

    wait: Callable[[], None]
    """Return when its copies are complete."""
    finish: Callable[[], Moved]
    """Wait, then change places: free the device side, or hand over what arrived there."""
    give_up: Callable[[], None]
    """Wait, then free what was taken for the move."""

    @classmethod
    def at_once(cls, move: Callable[[], Moved]) -> StartedMove:
        """A move without copies to wait for: all of it is made when it is finished."""
        return cls(wait=lambda: None, finish=move, give_up=lambda: None)


class Movable(Protocol):
    """One component as the planner moves it. A failed move leaves it as it was.

    A move can be made in two halves, so that copies off the device and onto it overlap.
    """

    @property
    def name(self) -> str:
        """Unique in a run, `<role>.<what>`."""
        ...

    @property
    def parking(self) -> Parking: ...

    @property
    def written_by(self) -> str: ...

    @property
    def host_key(self) -> str:
        """The host copy it is parked in; several components may share one."""
        ...

    @property
    def on_demand(self) -> bool:
        """Its role works without it; it comes when it is borrowed."""
        ...

    @property
    def is_resident(self) -> bool: ...

    def version(self) -> Version | Void:
        """Of its contents: those on the device or, while it is parked, those that left it."""
        ...

    def num_bytes(self) -> int:
        """Device bytes it takes when it is resident, also while it is not."""
        ...

    def host_bytes(self) -> int:
        """Bytes of its host copy; 0 before the first."""
        ...

    def park(self, *, copy: bool) -> Moved:
        """Free the device side; `copy`: the host copy is out of date, so write it first."""
        ...

    def start_park(self, *, copy: bool) -> StartedMove:
        """Start the copy to the host, if any; the device side is freed at the end."""
        ...

    def unpark(self) -> Moved:
        """Bring it back onto the device; contents come from the host copy where it has one."""
        ...

    def start_unpark(self) -> StartedMove:
        """Take its device memory and start the copy into it; neither is used before the end."""
        ...
