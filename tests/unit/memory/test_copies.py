"""Bytes that cross between the CPU's memory and itself, as if one side were a device."""

from __future__ import annotations

import psutil
import pytest
import torch

from unirl.core.errors import ResidencyError
from unirl.memory.copies import CpuDevice, as_bytes, device_of

MIB = 2**20


def test_bytes_go_out_and_come_back_into_emptied_storages():
    device = CpuDevice()
    tensors = [torch.arange(5.0), torch.arange(7).to(torch.int16), torch.empty(0)]
    expected = [tensor.clone() for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in tensors]
    host = [torch.empty(storage.nbytes(), dtype=torch.uint8) for storage in storages]
    device.copy_out(storages, host)
    device.empty(storages)
    assert [storage.nbytes() for storage in storages] == [0, 0, 0]
    device.allocate(storages, [20, 14, 0])
    device.copy_in(host, storages)
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def test_emptying_gives_memory_back_to_the_machine():
    process = psutil.Process()
    tensor = torch.ones(64 * MIB, dtype=torch.uint8)
    before = process.memory_info().rss
    CpuDevice().empty([tensor.untyped_storage()])
    assert before - process.memory_info().rss > 60 * MIB


def test_large_storages_come_back_whole():
    """From here on the kernel is asked for huge pages, within the bounds of the storage."""
    device = CpuDevice()
    tensor = torch.arange(2 * MIB + 5)
    storage = tensor.untyped_storage()
    host = as_bytes(storage).clone()
    device.empty([storage])
    device.allocate([storage], [host.numel()])
    device.copy_in([host], [storage])
    assert torch.equal(tensor, torch.arange(2 * MIB + 5))


def test_the_byte_view_of_a_storage_is_all_of_it():
    tensor = torch.arange(4, dtype=torch.int32)[1:3]
    expected = torch.arange(4, dtype=torch.int32).view(torch.uint8)
    assert torch.equal(as_bytes(tensor.untyped_storage()), expected)


def test_a_device_whose_memory_cannot_be_moved_is_refused():
    with pytest.raises(ResidencyError, match="weights on meta cannot be parked"):
        device_of(torch.device("meta"))


def test_one_device_has_one_object():
    assert device_of(torch.device("cpu")) is device_of(torch.device("cpu"))
