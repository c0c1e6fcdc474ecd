"""What a role holds on the device, declared by the role and moved by `memory.movers`. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

FROZEN = 0
"""The version of weights that are never written."""


@dataclass(frozen=True)
class TensorComponent:
    """Tensors that are parked as a copy on the host.

    A device copy whose version equals the host copy's is dropped instead of copied, so frozen
    weights cross from device to host once in a run.
    """

    name: str
    tensors: Callable[[], Iterable[Tensor]]
    """The tensors there are now: optimizer moments appear with the first step."""
    version: Callable[[], int | None]
    """Changes whenever the tensors were written; None: unknown, always copy."""


@dataclass(frozen=True)
class RebuiltComponent:
    """Something that frees itself and is built again from what the host keeps."""

    name: str
    drop: Callable[[], int]
    """Free the device side; returns the bytes given up."""
    rebuild: Callable[[], int]
    """Build it again; returns the bytes brought in."""


Component = TensorComponent | RebuiltComponent


@dataclass(frozen=True)
class Moved:
    """Bytes that one transition really moved, one way."""

    num_bytes: int
    """Copied between host and device, or built anew on the device."""
    dropped_bytes: int = 0
    """Freed without a copy: the host already had them."""

    @property
    def touched_bytes(self) -> int:
        return self.num_bytes + self.dropped_bytes


class WeightMover(Protocol):
    """Takes a role's components off the device and brings them back; both are idempotent."""

    def offload(self) -> Moved: ...

    def onload(self) -> Moved: ...
