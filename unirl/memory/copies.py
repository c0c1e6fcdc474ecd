"""How bytes cross between a device and the host.

A `Device` starts copies between storages and their host bytes, waits for them, and frees and gives
back the memory of storages. The movers are written against it, so they run the same over a GPU,
over the CPU, where both sides are RAM, and over the fake device of the tests. No copy needs
memory on the device besides the storages.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from unirl.core.errors import ResidencyError

CHUNK_BYTES = 256 * 2**20
"""What other traffic on the link waits for at most: 5 ms at 50 GB/s."""
HUGE_PAGE_BYTES = 2 * 2**20


class Device(Protocol):
    """Storages are as `tensor.untyped_storage()`, host bytes are uint8 and as long as theirs."""

    def copy_out(self, storages: Sequence[torch.UntypedStorage], host: Sequence[Tensor]) -> None:
        """Start copying storages to the host, after the work that is queued on the device."""
        ...

    def copy_in(self, host: Sequence[Tensor], storages: Sequence[torch.UntypedStorage]) -> None:
        """Start filling storages; work queued on the device later sees the new contents."""
        ...

    def wait(self) -> None:
        """Return when all started copies are complete."""
        ...

    def allocate(self, storages: Sequence[torch.UntypedStorage], sizes: Sequence[int]) -> None:
        """Give emptied storages memory of these sizes; its contents are arbitrary."""
        ...

    def empty(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Free the memory of storages that no copy is using; tensors keep their shapes."""
        ...


@functools.cache
def device_of(device: torch.device) -> Device:
    """The one object that moves bytes from and to this torch device."""
    match device.type:
        case "cpu":
            return CpuDevice()
        case "cuda":
            return CudaDevice(device)
    raise ResidencyError(f"weights on {device} cannot be parked; only those on cpu and cuda can")


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """[nbytes] uint8 view of a storage."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]


class CpuDevice:
    """Device and host are the same RAM: one memcpy for each storage, complete when it returns."""

    def copy_out(self, storages: Sequence[torch.UntypedStorage], host: Sequence[Tensor]) -> None:
        for storage, span in zip(storages, host, strict=True):
            # Not copy_: for small storages the tensor views would cost more than the bytes.
            ctypes.memmove(span.data_ptr(), storage.data_ptr(), storage.nbytes())

    def copy_in(self, host: Sequence[Tensor], storages: Sequence[torch.UntypedStorage]) -> None:
        for storage, span in zip(storages, host, strict=True):
            ctypes.memmove(storage.data_ptr(), span.data_ptr(), storage.nbytes())

    def wait(self) -> None:
        return

    def allocate(self, storages: Sequence[torch.UntypedStorage], sizes: Sequence[int]) -> None:
        for storage, size in zip(storages, sizes, strict=True):
            storage.resize_(size)
            if size >= 2 * HUGE_PAGE_BYTES:
                _ask_for_huge_pages(storage.data_ptr(), size)

    def empty(self, storages: Sequence[torch.UntypedStorage]) -> None:
        for storage in storages:
            storage.resize_(0)


class CudaDevice:
    """One stream each way, so that copies need not wait for each other or stand in the way of work.

    Host memory should be page-locked; from pageable memory the driver copies in the caller's time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)

    def copy_out(self, storages: Sequence[torch.UntypedStorage], host: Sequence[Tensor]) -> None:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            for storage, span in zip(storages, host, strict=True):
                _copy_chunks(span, as_bytes(storage))

    def copy_in(self, host: Sequence[Tensor], storages: Sequence[torch.UntypedStorage]) -> None:
        compute = torch.cuda.current_stream(self._device)
        # The memory may have had another owner, whose last work is still queued.
        self._in.wait_stream(compute)
        with torch.cuda.stream(self._in):
            for storage, span in zip(storages, host, strict=True):
                _copy_chunks(as_bytes(storage), span)
        # Also keeps the memory from a next owner until it is filled: it was allocated on `compute`.
        compute.wait_stream(self._in)

    def wait(self) -> None:
        self._out.synchronize()
        self._in.synchronize()

    def allocate(self, storages: Sequence[torch.UntypedStorage], sizes: Sequence[int]) -> None:
        with torch.cuda.device(self._device):
            for storage, size in zip(storages, sizes, strict=True):
                storage.resize_(size)

    def empty(self, storages: Sequence[torch.UntypedStorage]) -> None:
        for storage in storages:
            storage.resize_(0)


def _copy_chunks(target: Tensor, source: Tensor) -> None:
    for to, of in zip(target.split(CHUNK_BYTES), source.split(CHUNK_BYTES), strict=True):
        to.copy_(of, non_blocking=True)


def _ask_for_huge_pages(address: int, num_bytes: int) -> None:
    """Before memory is touched: a page fault per 2 MiB instead of per 4 KiB.

    Faults, not copies, are what refilling costs on a CPU. Only advice: a kernel without huge pages
    refuses, and nothing is lost.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
