"""The fake device catches what a GPU would let happen."""

from __future__ import annotations

import pytest
import torch
from fake_device import FakeDevice, FakeDeviceError, InjectedError


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice(capacity_bytes=100)


def host(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def test_a_copy_has_happened_only_once_it_was_waited_for(device):
    tensor, copy = device.put("weight", torch.ones(4)), host(16)
    device.copy_out([tensor.untyped_storage()], [copy])
    assert not torch.equal(copy.view(torch.float32), tensor)
    device.wait()
    assert torch.equal(copy.view(torch.float32), tensor)
    assert device.copied_out_bytes == 16


def test_what_is_written_under_a_copy_reaches_the_host(device):
    tensor, copy = device.put("weight", torch.ones(4)), host(16)
    device.copy_out([tensor.untyped_storage()], [copy])
    tensor.fill_(5)
    device.wait()
    assert copy.view(torch.float32).tolist() == [5] * 4


def test_reading_host_bytes_before_their_copy_is_complete_raises(device):
    tensor, copy = device.put("weight", torch.ones(4)), host(16)
    other = device.put("other", torch.ones(4))
    device.copy_out([tensor.untyped_storage()], [copy])
    with pytest.raises(FakeDeviceError, match="host bytes of other are still being copied"):
        device.copy_in([copy], [other.untyped_storage()])
    device.wait()
    device.copy_in([copy], [other.untyped_storage()])


def test_emptying_a_storage_under_a_copy_raises(device):
    storage = device.put("weight", torch.ones(4)).untyped_storage()
    device.copy_out([storage], [host(16)])
    with pytest.raises(FakeDeviceError, match="weight was emptied under a copy"):
        device.empty([storage])
    device.wait()
    device.empty([storage])
    device.require_used(0)


def test_reading_a_storage_that_is_being_filled_raises(device):
    storage = device.put("weight", torch.ones(4)).untyped_storage()
    device.copy_in([host(16)], [storage])
    with pytest.raises(FakeDeviceError, match="weight is still being copied"):
        device.copy_out([storage], [host(16)])


def test_more_memory_than_there_is_raises(device):
    weight = device.put("weight", torch.ones(20))
    storage = device.put("more", torch.ones(5)).untyped_storage()
    device.empty([storage])
    with pytest.raises(FakeDeviceError, match=r"out of memory: 80 \+ 21 of 100 bytes"):
        device.allocate([storage], [21])
    with pytest.raises(FakeDeviceError, match="out of memory"):
        device.put("most", torch.ones(6))
    assert weight.sum() == 20


def test_a_leak_is_named_with_its_bytes(device):
    tensor = device.put("weight", torch.ones(4))
    with pytest.raises(FakeDeviceError, match=r"0 bytes .* there are \[\('weight', 16\)\]"):
        device.require_used(0)
    del tensor
    device.require_used(0)


def test_copies_that_nobody_waited_for_are_noticed(device):
    storage = device.put("weight", torch.ones(4)).untyped_storage()
    device.copy_out([storage], [host(16)])
    with pytest.raises(FakeDeviceError, match="1 copies were never waited for"):
        device.require_idle()


def test_the_asked_for_operation_fails_once(device):
    storages = [device.put(str(i), torch.ones(1)).untyped_storage() for i in range(3)]
    device.operations_until_fault = 1
    with pytest.raises(InjectedError):
        device.empty(storages)
    assert [storage.nbytes() for storage in storages] == [0, 4, 4]
    device.empty(storages)
    device.require_used(0)
