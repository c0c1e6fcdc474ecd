"""Bytes that cross between the CPU's memory and itself, as if one side were a device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from unirl.core.errors import ResidencyError
from unirl.memory import copies
from unirl.memory.copies import CpuDevice, CudaDevice, as_bytes, device_of

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


GIVEN_BACK = """
import psutil, torch
from unirl.memory.copies import CpuDevice

tensor = torch.ones({num_bytes}, dtype=torch.uint8)
before = psutil.Process().memory_info().rss
CpuDevice().empty([tensor.untyped_storage()])
print(before - psutil.Process().memory_info().rss)
"""


def test_emptying_gives_memory_back_to_the_machine():
    # In a process of its own: where much was freed before, the C library takes even a large
    # tensor from memory that it holds, and gives it back to itself.
    program = GIVEN_BACK.format(num_bytes=256 * MIB)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 240 * MIB


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


# --- a GPU's streams, recorded -------------------------------------------------------------------


class Streams:
    """Stands in for torch.cuda's streams: what waits for what, and where copies are queued."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.current = self.compute = RecordedStream("compute", self.log)
        names = iter(["out", "in"])
        monkeypatch.setattr("torch.cuda.Stream", lambda _: RecordedStream(next(names), self.log))
        monkeypatch.setattr("torch.cuda.current_stream", lambda _: self.current)
        monkeypatch.setattr("torch.cuda.stream", self.use)
        monkeypatch.setattr(copies, "_copy_chunks", self.copy)

    @contextmanager
    def use(self, stream: RecordedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.log.append(f"copy on {self.current.name}")
        target.copy_(source)


class RecordedStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self._log = log

    def wait_stream(self, other: RecordedStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self._log.append(f"host waits for {self.name}")


def test_copies_wait_for_the_work_before_them_and_later_work_for_the_copies(monkeypatch):
    streams = Streams(monkeypatch)
    device = CudaDevice(torch.device("cuda"))
    tensor, host = torch.arange(3.0), torch.empty(12, dtype=torch.uint8)
    device.copy_out([tensor.untyped_storage()], [host])
    tensor.zero_()
    device.copy_in([host], [tensor.untyped_storage()])
    device.wait()
    assert tensor.tolist() == [0, 1, 2]
    assert streams.log == [
        "out waits for compute",
        "copy on out",
        "in waits for compute",
        "copy on in",
        "compute waits for in",
        "host waits for out",
        "host waits for in",
    ]


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 100])
def test_chunks_cover_every_byte(monkeypatch, num_bytes):
    monkeypatch.setattr(copies, "CHUNK_BYTES", 8)
    source = torch.arange(num_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    copies._copy_chunks(target, source)
    assert torch.equal(target, source)
