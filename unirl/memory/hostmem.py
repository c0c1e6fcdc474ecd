"""Host memory for parked weights: how much there may be, and the blocks that hold it.

`host_limit` says how much memory this process may use. A `HostArena` gives out blocks up to that
limit and keeps, under each host key, one `HostCopy`: the bytes of the storages of the components
with that key, one after another in one block. A block is made once and written again each cycle,
because making it is slower than the copy: page-locking alone runs at about 3 GB/s.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from unirl.core.errors import ResidencyError

logger = logging.getLogger("unirl.memory")

GIB = 2**30
ALIGNMENT = 64
"""Storages begin at multiples of this in their block, so that any dtype can be read in place."""
NUM_TOUCHING_THREADS = 8
CUDA_HOST_REGISTER_PORTABLE = 1
"""Page-locked for all GPUs of the process."""


@dataclass(frozen=True)
class HostLimit:
    """The most host memory that may be used, and which limit that is."""

    bytes: int
    source: str
    """For messages, e.g. `cgroup limit /sys/fs/cgroup/job/memory.max`."""
    is_chosen: bool = False
    """Somebody set it for parked weights: nothing is left free of it."""

    @property
    def reserve_bytes(self) -> int:
        """Left for everything else: 5 %, at least 2 GiB, but never more than 20 %."""
        return 0 if self.is_chosen else min(max(self.bytes // 20, 2 * GIB), self.bytes // 5)

    @property
    def usable_bytes(self) -> int:
        return self.bytes - self.reserve_bytes

    def share(self, num_processes: int) -> HostLimit:
        """The part of one of several processes that stand under the same limit."""
        source = f"1/{num_processes} of {self.source}"
        return self if num_processes == 1 else HostLimit(self.bytes // num_processes, source)


def host_limit(
    root: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
    physical_bytes: int | None = None,
) -> HostLimit:
    """The tightest of this process's cgroup limits (v1 and v2, up the tree) and physical memory.

    A container's root group limits too, although `membership` may name a path that only exists
    outside the container. v1 says "unlimited" with a number above any physical memory.
    """
    if physical_bytes is None:
        physical_bytes = psutil.virtual_memory().total
    limits = [HostLimit(physical_bytes, "physical memory")]
    for file in _limit_files(root, membership):
        text = file.read_text().strip() if file.is_file() else "max"
        if text != "max":
            limits.append(HostLimit(int(text), f"cgroup limit {file}"))
    return min(limits, key=lambda limit: limit.bytes)


def _limit_files(root: Path, membership: Path) -> list[Path]:
    """Where limits of this process may stand, innermost first."""
    lines = membership.read_text().splitlines() if membership.is_file() else []
    files: list[Path] = []
    for line in [*lines, "0::/", "0:memory:/"]:  # the roots themselves, whatever the file says
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files += _up_the_tree(root, path, "memory.max")
        elif "memory" in controllers.split(","):
            files += _up_the_tree(root / "memory", path, "memory.limit_in_bytes")
    return list(dict.fromkeys(files))


def _up_the_tree(mount: Path, path: str, file_name: str) -> list[Path]:
    inner = mount / path.lstrip("/")
    return [
        folder / file_name
        for folder in (inner, *inner.parents)
        if mount in (folder, *folder.parents)
    ]


@dataclass(frozen=True, eq=False)
class HostBlock:
    """Anonymous memory of an exact size, touched, and page-locked where `is_pinned`."""

    memory: Tensor
    """[num_bytes] uint8."""
    is_pinned: bool


class HostArena:
    """Gives out host memory up to a limit; holds one host copy for each host key."""

    def __init__(self, limit: HostLimit, pin: bool) -> None:
        """`pin`: page-lock the blocks for a GPU. Where that fails, they stay pageable: copies are
        then several times slower, which is said once."""
        self._limit = limit
        self._pin = pin
        self._copies: dict[str, HostCopy] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(copy.block_bytes for copy in self._copies.values())

    def copy_of(self, host_key: str) -> HostCopy:
        """The one copy under this key; empty at first."""
        return self._copies.setdefault(host_key, HostCopy(host_key, self))

    def allocate(self, wanted_by: str, num_bytes: int) -> HostBlock:
        """A block of its own; ResidencyError with the whole table when it would pass the limit."""
        if self.num_bytes + num_bytes > self._limit.usable_bytes:
            raise ResidencyError(self._refusal(wanted_by, num_bytes))
        memory = _touched_memory(num_bytes)
        return HostBlock(memory, is_pinned=num_bytes > 0 and self._pin and self._page_lock(memory))

    def _refusal(self, wanted_by: str, num_bytes: int) -> str:
        limit = self._limit
        rows = [(copy.host_key, copy.block_bytes) for copy in self._copies.values()]
        rows.sort(key=lambda row: -row[1])
        table = "".join(f"\n  {_gib(size):>12}  {key}" for key, size in rows if size)
        return (
            f"parking {wanted_by} needs {_gib(num_bytes)} of host memory. Parked weights take "
            f"{_gib(self.num_bytes)} and may take {_gib(limit.usable_bytes)}: the {limit.source} "
            f"is {_gib(limit.bytes)}, of which {_gib(limit.reserve_bytes)} are left free. Raise "
            "that limit, or keep a role on the device: set train_resident, rollout_resident or "
            f"reward_resident to true. Held now:{table or ' nothing'}"
        )

    def _page_lock(self, memory: Tensor) -> bool:
        try:
            lock_pages(memory.data_ptr(), memory.numel())
        except OSError as error:
            self._pin = False
            logger.warning(
                "%s of host memory could not be page-locked (%s); this and later blocks are "
                "pageable, and moves between host and device are several times slower",
                _gib(memory.numel()),
                error,
            )
            return False
        # Also runs at exit, while the driver is still there.
        weakref.finalize(memory, unlock_pages, memory.data_ptr())
        return True


class HostCopy:
    """The bytes on the host of all components with one host key."""

    def __init__(self, host_key: str, arena: HostArena) -> None:
        self.host_key = host_key
        self.written_by: str | None = None
        """Who wrote what it holds now; None while it holds nothing whole."""
        self.users: set[str] = set()
        """The components that rely on it or did."""
        self.sizes: tuple[int, ...] = ()
        """Bytes of each piece."""
        self.spans: list[Tensor] = []
        """uint8, one for each piece."""
        self._arena = arena
        self._block: HostBlock | None = None
        self._starts: list[int] = []
        """Where each piece begins in the block."""

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def block_bytes(self) -> int:
        return 0 if self._block is None else self._block.memory.numel()

    def joined_spans(self, counts: Sequence[int]) -> list[Tensor]:
        """uint8, one for as many neighbouring pieces as each count says.

        Pieces that are joined must be multiples of ALIGNMENT: then nothing lies between them.
        """
        if len(counts) == len(self.spans):
            return self.spans
        assert self._block is not None
        memory, starts, sizes = self._block.memory, self._starts, self.sizes
        return [
            memory[starts[stop - count] : starts[stop - 1] + sizes[stop - 1]]
            for count, stop in zip(counts, itertools.accumulate(counts), strict=True)
        ]

    def lay_out(self, sizes: Sequence[int], wanted_by: str) -> None:
        """Make room for pieces of these sizes; the same memory again where they are the same."""
        if self._block is not None and self.sizes == tuple(sizes):
            return
        self.written_by, self.sizes, self.spans = None, (), []
        self._block = None  # given back first, so that the old and the new need not both fit
        starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        self._block = self._arena.allocate(wanted_by, starts.pop())
        memory = self._block.memory
        self.spans = [memory[at : at + size] for at, size in zip(starts, sizes, strict=True)]
        self._starts = starts
        self.sizes = tuple(sizes)


def _touched_memory(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 in a mapping of its own, every page present.

    Not torch's pinned memory: that rounds up to powers of two.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    # Page faults are what making memory costs, and threads take them side by side.
    parts = np.array_split(memory[:: mmap.PAGESIZE], NUM_TOUCHING_THREADS)
    with ThreadPoolExecutor(NUM_TOUCHING_THREADS) as threads:
        list(threads.map(lambda part: part.fill(0), parts))
    return torch.from_numpy(memory)


def lock_pages(address: int, num_bytes: int) -> None:
    """Page-lock memory for the GPUs; OSError with the reason when it cannot be."""
    if not torch.cuda.is_available():
        raise OSError("there is no GPU")
    runtime: Any = torch.cuda.cudart()
    result = runtime.cudaHostRegister(address, num_bytes, CUDA_HOST_REGISTER_PORTABLE)
    if int(result) != 0:
        # CUDA remembers the failure and blames the next kernel for it, so let that be this one.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
        raise OSError(runtime.cudaGetErrorString(result))


def unlock_pages(address: int) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3f} GiB"
