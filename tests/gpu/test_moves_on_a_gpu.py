"""Moves between a real GPU and page-locked memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from unirl.core.components import FROZEN, Moved, Parking, TensorComponent
from unirl.memory.hostmem import HostArena, host_limit
from unirl.memory.movers import RoleWeights
from unirl.memory.parts import TensorPart
from unirl.train.optimizer import moment_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

MIB = 2**20


@pytest.fixture
def host() -> HostArena:
    return HostArena(host_limit(), pin=True)


def part(
    tensors: list[Tensor], host: HostArena, name: str = "part", parking: Parking = Parking.COPY
) -> TensorPart:
    declared = TensorComponent(name, lambda: tensors, lambda: FROZEN, parking=parking)
    (only,) = RoleWeights([declared], host).parts
    assert isinstance(only, TensorPart)
    return only


def some_tensors() -> list[Tensor]:
    """Sizes around a page, odd ones, an empty one, and more than one chunk."""
    sizes = (1, 4095, 4097, 0, 3 * MIB + 1, 300 * MIB)
    return [torch.randint(256, (n,), dtype=torch.uint8, device="cuda") for n in sizes]


def test_bytes_survive_many_cycles_and_device_memory_is_given_back(host):
    tensors = some_tensors()
    expected = [tensor.cpu() for tensor in tensors]
    allocated = torch.cuda.memory_allocated()
    moved = part(tensors, host)
    for cycle in range(20):
        moved.park(copy=cycle % 2 == 0)
        assert allocated - torch.cuda.memory_allocated() >= sum(t.numel() for t in expected)
        moved.unpark()
        assert torch.cuda.memory_allocated() == allocated
    assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors, expected, strict=True))


def test_the_host_copy_is_page_locked_and_of_exact_size(host):
    tensors = [torch.zeros(9 * MIB, dtype=torch.uint8, device="cuda")]
    part(tensors, host).park(copy=True)
    assert host.copy_of("part").spans[0].is_pinned()
    assert host.num_bytes == 9 * MIB


def test_work_that_was_queued_before_a_park_is_in_the_copy(host):
    tensor = torch.zeros(64 * MIB, device="cuda")
    moved = part([tensor], host)
    moved.park(copy=True)
    moved.unpark()
    torch.cuda._sleep(100_000_000)
    tensor.add_(1)
    moved.park(copy=True)
    assert moved.read(tensor).eq(1).all()


def test_memory_that_a_queued_kernel_still_uses_is_not_filled_early(host):
    """The refilled storage may get memory whose last owner's work is still queued."""
    tensor = torch.ones(64 * MIB, device="cuda")
    moved = part([tensor], host)
    moved.park(copy=True)
    other = torch.zeros(64 * MIB, device="cuda")
    torch.cuda._sleep(100_000_000)
    other.fill_(5)
    result = other * 2
    del other
    moved.unpark()
    assert tensor.eq(1).all()
    assert result.eq(10).all()


def test_parked_values_are_read_without_a_move(host):
    tensor = torch.arange(1000.0, device="cuda").view(10, 100)
    view = tensor[3:5, 7:]
    expected = view.cpu()
    moved = part([tensor], host)
    assert torch.equal(moved.read(view), expected)
    moved.park(copy=True)
    assert torch.equal(moved.read(view), expected)
    assert view.untyped_storage().nbytes() == 0


def test_dropped_contents_come_back_as_nan(host):
    tensor = torch.ones(1000, dtype=torch.bfloat16, device="cuda")
    moved = part([tensor], host, parking=Parking.DROP)
    assert moved.park(copy=False) == Moved(0, 2000)
    moved.unpark()
    assert tensor.isnan().all()


def test_training_with_parking_is_bitwise_training_without(host):
    def train(parks: bool) -> list[Tensor]:
        torch.manual_seed(0)
        network = torch.nn.Linear(256, 256, device="cuda")
        optimizer = torch.optim.AdamW(network.parameters())
        x = torch.randn(32, 256, device="cuda")
        weights = list(network.parameters())
        moved = RoleWeights(
            [
                TensorComponent("weights", lambda: weights, lambda: None),
                TensorComponent("moments", lambda: moment_tensors(optimizer), lambda: None),
            ],
            host,
        )
        for _ in range(10):
            if parks:
                for one in moved.parts:
                    one.park(copy=True)
                for one in moved.parts:
                    one.unpark()
            network(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return [tensor.detach().cpu() for tensor in [*weights, *moment_tensors(optimizer)]]

    pairs = zip(train(parks=False), train(parks=True), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def test_the_check_script_finds_nothing_wrong():
    script = Path(__file__).parents[2] / "scripts" / "gpu_residency_check.py"
    done = subprocess.run([sys.executable, script, "--gib", "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
