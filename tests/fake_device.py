"""A device that is not there: CPU tensors, a ledger of their bytes, and copies that take a while.

A started copy has happened only once it was waited for; until then its target holds junk. Whatever
a GPU would let happen and corrupt silently raises here: reading host bytes too early, emptying or
reading a storage that a copy is still using, and more memory than there is.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, UntypedStorage

from unirl.memory.copies import as_bytes

JUNK = 0xA5


class FakeDeviceError(Exception):
    """A use of the device that would be a race, a leak or out of memory."""


class InjectedError(Exception):
    """The fault that a test asked for."""


@dataclass(frozen=True, eq=False)
class _Copy:
    source: Tensor
    target: Tensor
    storage: UntypedStorage
    is_out: bool


class FakeDevice:
    """Implements `memory.copies.Device` for tensors that were put on it."""

    def __init__(self, capacity_bytes: int = 2**62) -> None:
        self.capacity_bytes = capacity_bytes
        self.copied_out_bytes = 0
        self.copied_in_bytes = 0
        self.operations_until_fault: int | None = None
        """The operation on one storage that raises: 0 is the next one."""
        self._names: weakref.WeakKeyDictionary[UntypedStorage, str] = weakref.WeakKeyDictionary()
        self._pending: list[_Copy] = []

    def put(self, name: str, tensor: Tensor) -> Tensor:
        """Count this tensor's memory as the device's; `name` is for messages."""
        self._names[tensor.untyped_storage()] = name
        self._require_room(0)
        return tensor

    @property
    def used_bytes(self) -> int:
        """Of all storages that anybody still holds."""
        return sum(storage.nbytes() for storage in self._names)

    def require_used(self, num_bytes: int) -> None:
        """FakeDeviceError naming what is on the device when it is not this much."""
        if self.used_bytes != num_bytes:
            held = sorted((n, s.nbytes()) for s, n in self._names.items() if s.nbytes())
            raise FakeDeviceError(f"{num_bytes} bytes should be on the device, there are {held}")

    def require_idle(self) -> None:
        if self._pending:
            raise FakeDeviceError(f"{len(self._pending)} copies were never waited for")

    # --- Device ---------------------------------------------------------------------------------

    def copy_out(self, storages: Sequence[UntypedStorage], host: Sequence[Tensor]) -> None:
        for storage, span in zip(storages, host, strict=True):
            self._count_operation()
            self._refuse_use(storage, span)
            self._start(_Copy(as_bytes(storage), span, storage, is_out=True))

    def copy_in(self, host: Sequence[Tensor], storages: Sequence[UntypedStorage]) -> None:
        for storage, span in zip(storages, host, strict=True):
            self._count_operation()
            self._refuse_use(storage, span)
            self._start(_Copy(span, as_bytes(storage), storage, is_out=False))

    def wait(self) -> None:
        for copy in self._pending:
            copy.target.copy_(copy.source)
            if copy.is_out:
                self.copied_out_bytes += copy.target.numel()
            else:
                self.copied_in_bytes += copy.target.numel()
        self._pending.clear()

    def allocate(self, storages: Sequence[UntypedStorage], sizes: Sequence[int]) -> None:
        for storage, size in zip(storages, sizes, strict=True):
            self._count_operation()
            self._require_room(size)
            self._names.setdefault(storage, "memory that movers made")
            storage.resize_(size)
            as_bytes(storage).fill_(JUNK)

    def empty(self, storages: Sequence[UntypedStorage]) -> None:
        for storage in storages:
            self._count_operation()
            if any(copy.storage is storage for copy in self._pending):
                raise FakeDeviceError(f"{self._name(storage)} was emptied under a copy")
            storage.resize_(0)

    # --- checks ---------------------------------------------------------------------------------

    def _start(self, copy: _Copy) -> None:
        copy.target.fill_(JUNK)
        self._pending.append(copy)

    def _refuse_use(self, storage: UntypedStorage, host: Tensor) -> None:
        for copy in self._pending:
            in_flight = copy.target if copy.is_out else copy.source
            if in_flight.data_ptr() == host.data_ptr() and host.numel():
                raise FakeDeviceError(f"host bytes of {self._name(storage)} are still being copied")
            if copy.storage is storage:
                raise FakeDeviceError(f"{self._name(storage)} is still being copied")

    def _require_room(self, size: int) -> None:
        if self.used_bytes + size > self.capacity_bytes:
            raise FakeDeviceError(
                f"out of memory: {self.used_bytes} + {size} of {self.capacity_bytes} bytes"
            )

    def _count_operation(self) -> None:
        if self.operations_until_fault is None:
            return
        self.operations_until_fault -= 1
        if self.operations_until_fault < 0:
            self.operations_until_fault = None
            raise InjectedError("asked for by the test")

    def _name(self, storage: UntypedStorage) -> str:
        return self._names.get(storage, "an unnamed tensor")
