"""How much host memory there is, and that no more is taken."""

from __future__ import annotations

import ctypes
import logging
import mmap
from pathlib import Path

import psutil
import pytest
import torch

from unirl.core.errors import ResidencyError
from unirl.memory import hostmem
from unirl.memory.hostmem import GIB, HostArena, HostLimit, host_limit

PHYSICAL = 64 * GIB
UNLIMITED_V1 = 2**63 - 4096


class Tree:
    """A cgroup file system and the process's place in it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cgroup"
        self.membership = folder / "membership"
        self.root.mkdir()

    def write(self, path: str, content: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")

    def limit(self, membership: str) -> HostLimit:
        self.membership.write_text(membership)
        return host_limit(self.root, self.membership, PHYSICAL)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_v2_limit_of_the_own_group(tree):
    tree.write("job/memory.max", 8 * GIB)
    limit = tree.limit("0::/job\n")
    assert limit == HostLimit(8 * GIB, f"cgroup limit {tree.root}/job/memory.max")


@pytest.mark.parametrize("tight", ["user", "user/job", "user/job/step"])
def test_v2_takes_the_tightest_up_the_tree(tree, tight):
    for group in ("user", "user/job", "user/job/step"):
        tree.write(f"{group}/memory.max", 8 * GIB if group == tight else 16 * GIB)
    limit = tree.limit("0::/user/job/step\n")
    assert limit == HostLimit(8 * GIB, f"cgroup limit {tree.root}/{tight}/memory.max")


def test_v2_without_a_limit_leaves_physical_memory(tree):
    tree.write("memory.max", "max")
    tree.write("job/memory.max", "max")
    assert tree.limit("0::/job\n") == HostLimit(PHYSICAL, "physical memory")


def test_a_container_is_limited_at_its_root(tree):
    tree.write("memory.max", 4 * GIB)
    for membership in ("0::/\n", "0::/kubepods/pod1/only-outside\n", "0::/../../above\n"):
        limit = tree.limit(membership)
        assert limit == HostLimit(4 * GIB, f"cgroup limit {tree.root}/memory.max")


def test_v1_limits_are_read_up_the_tree_of_the_memory_controller(tree):
    tree.write("memory/docker/memory.limit_in_bytes", 8 * GIB)
    tree.write("memory/docker/abc/memory.limit_in_bytes", UNLIMITED_V1)
    tree.write("cpu/docker/abc/memory.limit_in_bytes", 1)
    limit = tree.limit("5:cpu,cpuacct:/docker/abc\n4:hugetlb,memory:/docker/abc\n")
    assert limit == HostLimit(
        8 * GIB, f"cgroup limit {tree.root}/memory/docker/memory.limit_in_bytes"
    )


def test_v1_unlimited_leaves_physical_memory(tree):
    tree.write("memory/memory.limit_in_bytes", UNLIMITED_V1)
    assert tree.limit("4:memory:/\n") == HostLimit(PHYSICAL, "physical memory")


def test_v1_container_is_limited_at_its_root(tree):
    tree.write("memory/memory.limit_in_bytes", 4 * GIB)
    assert tree.limit("4:memory:/docker/only-outside\n").bytes == 4 * GIB


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_the_root_limits_although_no_membership_is_known(tree, file):
    tree.write(file, 4 * GIB)
    assert host_limit(tree.root, tree.root / "nothing", PHYSICAL).bytes == 4 * GIB


def test_a_group_beside_the_own_one_does_not_limit(tree):
    tree.write("other/memory.max", GIB)
    tree.write("job/memory.max", 8 * GIB)
    assert tree.limit("0::/job\n").bytes == 8 * GIB


def test_folders_above_the_mount_are_not_read(tree):
    (tree.root.parent / "memory.max").write_text("1\n")
    assert tree.limit("0::/job\n") == HostLimit(PHYSICAL, "physical memory")


def test_a_machine_without_cgroups_has_its_physical_memory(tmp_path):
    limit = host_limit(tmp_path / "nowhere", tmp_path / "nothing")
    assert limit == HostLimit(psutil.virtual_memory().total, "physical memory")


@pytest.mark.parametrize(
    ("limit_gib", "reserve_gib"), [(1, 0.2), (5, 1), (10, 2), (30, 2), (40, 2), (100, 5)]
)
def test_the_reserve_is_a_twentieth_within_2_gib_and_a_fifth(limit_gib, reserve_gib):
    limit = HostLimit(limit_gib * GIB, "a test")
    assert limit.reserve_bytes == int(reserve_gib * GIB)
    assert limit.usable_bytes == limit.bytes - limit.reserve_bytes


def test_processes_under_one_limit_share_it():
    limit = HostLimit(64 * GIB, "physical memory")
    assert limit.share(4) == HostLimit(16 * GIB, "1/4 of physical memory")
    assert limit.share(1) == limit


# --- blocks ---------------------------------------------------------------------------------------

MIB = 2**20


def arena(limit_bytes: int, pin: bool = False) -> HostArena:
    return HostArena(HostLimit(limit_bytes, "cgroup limit /job/memory.max"), pin)


def lay_out(host: HostArena, key: str, *sizes: int) -> None:
    host.copy_of(key).lay_out(sizes, key)


def test_blocks_have_their_exact_size():
    """torch's pinned allocations round up to powers of two: 2.25 GiB would take 4."""
    host = arena(GIB)
    lay_out(host, "base", 9 * MIB)
    assert host.num_bytes == 9 * MIB
    lay_out(host, "moments", 64, 64)
    assert host.num_bytes == 9 * MIB + 128


def test_storages_lie_apart_and_begin_where_any_dtype_can():
    host = arena(GIB)
    lay_out(host, "odd", 3, 0, 65, 8)
    copy = host.copy_of("odd")
    assert [span.numel() for span in copy.spans] == [3, 0, 65, 8]
    assert [span.storage_offset() for span in copy.spans] == [0, 64, 64, 192]
    for number, span in enumerate(copy.spans):
        span.fill_(number)
    assert [set(span.tolist()) for span in copy.spans] == [{0}, set(), {2}, {3}]
    assert copy.num_bytes == 76


def test_the_same_sizes_get_the_same_memory_again():
    host = arena(GIB)
    lay_out(host, "base", 4096, 100)
    address = host.copy_of("base").spans[0].data_ptr()
    host.copy_of("base").spans[1].fill_(7)
    lay_out(host, "base", 4096, 100)
    assert host.copy_of("base").spans[0].data_ptr() == address
    assert host.copy_of("base").spans[1].tolist() == [7] * 100


def test_growing_gives_the_old_memory_back_first():
    host = arena(100 * MIB)
    lay_out(host, "moments", 50 * MIB)
    lay_out(host, "moments", 70 * MIB)
    assert host.num_bytes == 70 * MIB
    lay_out(host, "moments", 1 * MIB)
    assert host.num_bytes == 1 * MIB


def test_the_arena_may_be_filled_to_the_last_usable_byte_and_no_further():
    host = arena(100 * MIB)
    lay_out(host, "a", 80 * MIB)
    with pytest.raises(ResidencyError):
        lay_out(host, "b", 1)
    assert host.num_bytes == 80 * MIB


def test_a_refusal_says_who_wants_what_who_holds_what_and_what_limits():
    host = arena(100 * MIB)
    lay_out(host, "small", 10 * MIB)
    lay_out(host, "train.base", 40 * MIB)
    with pytest.raises(ResidencyError) as refused:
        host.copy_of("base").lay_out([64 * MIB], "rollout.base")
    text = str(refused.value)
    assert "parking rollout.base needs 0.062 GiB" in text
    assert "take 0.049 GiB and may take 0.078 GiB" in text
    assert "cgroup limit /job/memory.max is 0.098 GiB, of which 0.020 GiB are left free" in text
    assert "rollout_resident" in text
    rows = [line.split() for line in text.splitlines()[1:]]
    assert rows == [["0.039", "GiB", "train.base"], ["0.010", "GiB", "small"]]


def test_a_copy_that_was_refused_holds_nothing():
    host = arena(100 * MIB)
    lay_out(host, "moments", MIB)
    host.copy_of("moments").written_by = "train.moments"
    with pytest.raises(ResidencyError):
        lay_out(host, "moments", 90 * MIB)
    assert host.num_bytes == 0
    assert host.copy_of("moments").written_by is None


def num_resident_pages(address: int, num_bytes: int) -> int:
    pages = (ctypes.c_ubyte * (num_bytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), pages) == 0
    return sum(page & 1 for page in pages)


def test_every_page_of_a_block_is_there_before_it_is_locked(monkeypatch):
    resident = []

    def lock(address: int, num_bytes: int) -> None:
        resident.append(num_resident_pages(address, num_bytes))

    monkeypatch.setattr(hostmem, "lock_pages", lock)
    monkeypatch.setattr(hostmem, "unlock_pages", lambda address: None)
    lay_out(arena(GIB, pin=True), "base", 9 * MIB)
    assert resident == [9 * MIB // mmap.PAGESIZE]


# --- page-locking ---------------------------------------------------------------------------------


class Locks:
    """Stands in for the driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.locked: dict[int, int] = {}
        self.unlocked: list[int] = []
        monkeypatch.setattr(hostmem, "lock_pages", self.locked.__setitem__)
        monkeypatch.setattr(hostmem, "unlock_pages", self.unlocked.append)


def test_blocks_are_locked_once_for_all_their_cycles(monkeypatch):
    locks = Locks(monkeypatch)
    host = arena(GIB, pin=True)
    for _ in range(3):
        lay_out(host, "base", 5 * MIB, 3)
    assert list(locks.locked.values()) == [5 * MIB + 64]
    assert locks.unlocked == []


def test_blocks_that_are_given_back_are_unlocked(monkeypatch):
    locks = Locks(monkeypatch)
    host = arena(GIB, pin=True)
    lay_out(host, "moments", MIB)
    lay_out(host, "moments", 2 * MIB)
    assert len(locks.locked) == 2
    assert locks.unlocked == [next(iter(locks.locked))]


def test_without_pin_nothing_is_locked(monkeypatch):
    locks = Locks(monkeypatch)
    lay_out(arena(GIB), "base", MIB)
    assert locks.locked == {}


def test_memory_that_cannot_be_locked_is_pageable_and_said_once(monkeypatch, caplog):
    locks = Locks(monkeypatch)

    def refuse(address: int, num_bytes: int) -> None:
        raise OSError("operation not supported")

    monkeypatch.setattr(hostmem, "lock_pages", refuse)
    host = arena(GIB, pin=True)
    with caplog.at_level(logging.WARNING, logger="unirl.memory"):
        lay_out(host, "base", 512 * MIB)
        lay_out(host, "moments", MIB)
    assert len(caplog.messages) == 1
    assert "0.500 GiB of host memory could not be page-locked (operation not supp" in caplog.text
    host.copy_of("base").spans[0][:3] = 9
    assert host.num_bytes == 513 * MIB
    assert locks.unlocked == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_locking_fails_with_the_reason():
    with pytest.raises(OSError, match="there is no GPU"):
        hostmem.lock_pages(0, 4096)


def test_a_limit_that_somebody_chose_is_taken_as_it_is():
    chosen = HostLimit(1000, "key host_budget_gib", is_chosen=True)
    assert chosen.usable_bytes == 1000
    arena = HostArena(chosen, pin=False)
    arena.allocate("weights", 1000)
