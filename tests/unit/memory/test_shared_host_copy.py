"""Components that hold the same values are parked in one host copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unirl.core.components import FROZEN, Moved, TensorComponent
from unirl.core.errors import ResidencyError
from unirl.memory.hostmem import GIB, HostArena, HostLimit
from unirl.memory.movers import RoleWeights
from unirl.memory.parts import TensorPart


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def host() -> HostArena:
    return HostArena(HostLimit(64 * GIB, "a test"), pin=False)


def part(name: str, tensors: list[Tensor], host: HostArena) -> TensorPart:
    declared = TensorComponent(name, lambda: tensors, lambda: FROZEN, host_key="base")
    (only,) = RoleWeights([declared], host).parts
    assert isinstance(only, TensorPart)
    return only


def test_the_second_reader_copies_nothing_and_both_come_back(host):
    expected = [random(1000), random(7, 3, seed=1)]
    train, rollout = ([tensor.clone() for tensor in expected] for _ in range(2))
    first, second = part("train.base", train, host), part("rollout.base", rollout, host)
    for cycle in range(3):
        assert first.park(copy=cycle == 0).num_bytes == (4084 if cycle == 0 else 0)
        assert second.park(copy=False) == Moved(0, 4084)
        assert first.unpark() == second.unpark() == Moved(4084)
        assert all(torch.equal(a, b) for a, b in zip([*train, *rollout], expected * 2, strict=True))


def test_a_shared_copy_is_one_block_and_each_part_counts_it(host):
    first, second = (part(name, [random(1024)], host) for name in ("train.base", "rollout.base"))
    assert second.host_bytes() == 0
    first.park(copy=True)
    before = host.num_bytes
    second.park(copy=False)
    assert host.num_bytes == before == 4096
    assert first.host_bytes() == second.host_bytes() == 4096


def test_readers_read_the_one_copy(host):
    tensor, twin = random(5), random(5)
    part("train.base", [tensor], host).park(copy=True)
    second = part("rollout.base", [twin], host)
    second.park(copy=False)
    assert torch.equal(second.read(twin), random(5))


@pytest.mark.parametrize("position", [0, 50_000, 99_999])
def test_weights_that_differ_are_refused_and_stay_on_the_device(host, position):
    tensor, other = random(100_000), random(100_000)
    first, second = part("train.base", [tensor], host), part("rollout.base", [other], host)
    # An eighth of the weights: more than what lies between two samples.
    start = position // 12_500 * 12_500
    other[start : start + 12_500].add_(1)
    first.park(copy=True)
    with pytest.raises(
        ResidencyError, match=r"rollout.base does not hold what train.base left on the host"
    ):
        second.park(copy=False)
    assert second.is_resident
    assert other.untyped_storage().nbytes() == 400_000


@pytest.mark.parametrize("position", [0, 1023, 99_000, 99_999])
def test_the_first_and_the_last_page_of_large_weights_are_compared(host, position):
    tensor, other = random(100_000), random(100_000)
    other[position] += 1
    part("train.base", [tensor], host).park(copy=True)
    with pytest.raises(ResidencyError, match="does not hold what"):
        part("rollout.base", [other], host).park(copy=False)


@pytest.mark.parametrize("position", range(0, 16_000, 1600))
def test_small_weights_are_compared_whole(host, position):
    tensor, other = random(16_000), random(16_000)
    other[position] += 1
    part("train.base", [tensor], host).park(copy=True)
    with pytest.raises(ResidencyError, match="does not hold what"):
        part("rollout.base", [other], host).park(copy=False)


def test_values_that_are_no_numbers_compare_by_their_bits(host):
    first, second = (part(name, [torch.full((3,), torch.nan)], host) for name in ("a", "b"))
    first.park(copy=True)
    assert second.park(copy=False) == Moved(0, 12)


def test_only_the_first_reliance_is_checked(host):
    """Later the versions vouch: reading device memory back each cycle would cost a transfer."""
    tensor, other = random(5), random(5)
    first, second = part("train.base", [tensor], host), part("rollout.base", [other], host)
    first.park(copy=True)
    second.park(copy=False)
    second.unpark()
    other.zero_()
    assert second.park(copy=False) == Moved(0, 20)
    second.unpark()
    assert torch.equal(other, random(5)), "contents come from the host copy"


@pytest.mark.parametrize("copy", [False, True])
def test_other_sizes_under_one_key_are_refused(host, copy):
    tensor = random(5)
    first, second = part("train.base", [tensor], host), part("rollout.base", [random(6)], host)
    first.park(copy=True)
    with pytest.raises(
        ResidencyError,
        match=r"rollout.base has 1 storages of 24 bytes in all, but train.base left 1 of 20 bytes",
    ):
        second.park(copy=copy)
    assert second.is_resident
    first.unpark()
    assert torch.equal(tensor, random(5))


def test_a_copy_that_another_part_relies_on_is_not_laid_out_anew(host):
    tensors, other = [random(5)], random(5)
    first, second = part("train.base", tensors, host), part("rollout.base", [other], host)
    first.park(copy=True)
    second.park(copy=False)
    first.unpark()
    tensors.append(random(3))
    with pytest.raises(ResidencyError, match="Give them keys of their own"):
        first.park(copy=True)
    second.unpark()
    assert torch.equal(other, random(5))


def test_a_part_alone_with_its_key_writes_what_it_never_wrote(host):
    """Asked to rely on a copy that does not exist, it makes one instead of losing the weights."""
    tensor = random(5)
    only = part("train.base", [tensor], host)
    assert only.park(copy=False) == Moved(20)
    only.unpark()
    assert torch.equal(tensor, random(5))


def test_a_newer_version_written_by_one_is_what_the_other_comes_back_with(host):
    tensor, other = random(5), random(5)
    first, second = part("train.adapter", [tensor], host), part("rollout.adapter", [other], host)
    second.park(copy=True)
    tensor.fill_(3)
    assert first.park(copy=True) == Moved(20)
    second.unpark()
    assert other.tolist() == [3] * 5


def test_keys_of_their_own_are_copies_of_their_own(host):
    tensors = [random(1024, seed=seed) for seed in range(2)]
    expected = [tensor.clone() for tensor in tensors]
    weights = RoleWeights(
        [
            TensorComponent("a", lambda: tensors[:1], lambda: FROZEN),
            TensorComponent("b", lambda: tensors[1:], lambda: FROZEN),
        ],
        host,
    )
    for one in weights.parts:
        one.park(copy=True)
    assert host.num_bytes == 8192
    for one in weights.parts:
        one.unpark()
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
