"""Moves between a fake device and the host: no race, no leak, all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from fake_device import FakeDevice, FakeDeviceError, InjectedError
from torch import Tensor, nn

from unirl.core.components import FROZEN, Moved, Parking, TensorComponent
from unirl.core.errors import ResidencyError
from unirl.memory.hostmem import GIB, HostArena, HostLimit
from unirl.memory.movers import RoleWeights
from unirl.memory.parts import TensorPart
from unirl.train.optimizer import moment_tensors


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights_on(
    device: FakeDevice, *components: TensorComponent, host: HostArena | None = None
) -> RoleWeights:
    host = host or HostArena(HostLimit(64 * GIB, "a test"), pin=False)
    return RoleWeights(components, host, device_of=lambda _: device)


def some_part(
    device: FakeDevice, parking: Parking = Parking.COPY
) -> tuple[TensorPart, list[Tensor]]:
    """Three storages under four tensors."""
    tensors = [device.put(f"tensor {n}", random(8 + n, seed=n)) for n in range(3)]
    tensors.append(tensors[0].view(2, 4))
    declared = TensorComponent("part", lambda: tensors, lambda: FROZEN, parking=parking)
    (part,) = weights_on(device, declared).parts
    assert isinstance(part, TensorPart)
    return part, tensors


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# --- copies take a while (R14) --------------------------------------------------------------------


def test_storages_are_emptied_and_used_only_when_their_copies_are_complete():
    device = FakeDevice()
    part, tensors = some_part(device)
    expected = [tensor.clone() for tensor in tensors]
    for _ in range(3):
        part.park(copy=True)  # the device raises where a copy is not waited for
        device.require_used(0)
        device.require_idle()
        part.unpark()
        device.require_idle()
        assert same(tensors, expected)


def test_a_mover_that_does_not_wait_is_caught():
    device = FakeDevice()
    part, _ = some_part(device)
    device.wait = lambda: None  # type: ignore[method-assign]
    with pytest.raises(FakeDeviceError, match="emptied under a copy"):
        part.park(copy=True)


def test_a_parked_tensor_is_read_from_a_complete_copy():
    device = FakeDevice()
    part, tensors = some_part(device)
    expected = tensors[1].clone()
    part.park(copy=True)
    assert torch.equal(part.read(tensors[1]), expected)
    assert device.used_bytes == 0, "reading moves nothing"


# --- bytes ----------------------------------------------------------------------------------------


def test_frozen_weights_cross_to_the_host_once_in_a_run():
    device = FakeDevice()
    part, _held = some_part(device)
    for cycle in range(20):
        part.park(copy=cycle == 0)
        part.unpark()
    assert device.copied_out_bytes == (8 + 9 + 10) * 4
    assert device.copied_in_bytes == 20 * device.copied_out_bytes


def test_two_readers_of_one_host_copy_send_it_once():
    device = FakeDevice()
    host = HostArena(HostLimit(64 * GIB, "a test"), pin=False)
    parts = []
    for role in ("train", "rollout"):
        tensor = device.put(role, random(100))
        declared = TensorComponent(
            f"{role}.base", lambda t=tensor: [t], lambda: FROZEN, host_key="base"
        )
        parts.append(weights_on(device, declared, host=host).parts[0])
    for cycle in range(3):
        parts[0].park(copy=cycle == 0)
        parts[1].park(copy=False)
        device.require_used(0)
        for part in parts:
            part.unpark()
    assert device.copied_out_bytes == 400


def test_tied_and_viewed_storages_are_counted_and_moved_once_and_stay_tied():
    """R13."""
    device = FakeDevice(capacity_bytes=108)
    part, tensors = some_part(device)
    assert part.num_bytes() == device.used_bytes == 108
    for _ in range(3):
        assert part.park(copy=True) == Moved(108)
        assert part.unpark() == Moved(108)
    tensors[0][5] = 42
    assert tensors[3][1, 1] == 42


@pytest.mark.parametrize("parking", [Parking.COPY, Parking.DROP])
def test_a_move_takes_no_device_memory_besides_the_storages(parking):
    device = FakeDevice(capacity_bytes=108)
    part, _ = some_part(device, parking)
    for copy in (True, False):
        part.park(copy=copy)
        part.unpark()
    assert device.used_bytes == 108


def test_two_roles_swap_within_the_memory_of_the_larger():
    device = FakeDevice(capacity_bytes=48)
    host = HostArena(HostLimit(64 * GIB, "a test"), pin=False)
    tensors, parts = [], []
    for name, size in (("train", 12), ("rollout", 10)):
        tensor = device.put(name, random(size))
        declared = TensorComponent(name, lambda t=tensor: [t], lambda: FROZEN)
        (part,) = weights_on(device, declared, host=host).parts
        part.park(copy=True)
        tensors.append(tensor)
        parts.append(part)
    for active, tensor in zip(parts * 2, tensors * 2, strict=True):
        active.unpark()
        assert torch.equal(tensor, random(tensor.numel()))
        active.park(copy=False)


# --- the optimizer (R11, R12) ---------------------------------------------------------------------


class Trainer:
    """A small network with tied weights, a buffer and AdamW, all on the fake device."""

    def __init__(self, device: FakeDevice) -> None:
        torch.manual_seed(0)
        self.device = device
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = random(6, 6, seed=3)
        self.scale = torch.ones(3)
        self.parameters = [self.first.weight, self.first.bias, self.second.bias]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1)
        self.num_steps = 0
        for number, tensor in enumerate([*self.parameters, self.frozen, self.scale]):
            device.put(f"weight {number}", tensor)
        self.weights = weights_on(
            device,
            TensorComponent("base", lambda: [self.frozen], lambda: FROZEN),
            TensorComponent("trained", lambda: self.parameters, lambda: self.num_steps),
            TensorComponent(
                "moments", lambda: moment_tensors(self.optimizer), lambda: self.num_steps
            ),
            TensorComponent("buffers", lambda: [self.scale], lambda: None),
        )

    def step(self) -> float:
        x = self.second(self.first(random(2, 6)) @ self.frozen) * self.scale.sum()
        loss = x.square().mean()
        loss.backward()
        self.scale.mul_(0.9)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        for number, moment in enumerate(moment_tensors(self.optimizer)):
            self.device.put(f"moment {number}", moment)
        return float(loss.detach())

    def cycle(self) -> None:
        for part in self.weights.parts:
            part.park(copy=part.name != "base" or part.host_bytes() == 0)
        self.device.require_used(0)
        self.device.require_idle()
        for part in self.weights.parts:
            part.unpark()

    @property
    def state(self) -> list[Tensor]:
        return [*self.parameters, self.frozen, self.scale, *moment_tensors(self.optimizer)]


def test_twenty_cycles_are_bitwise_no_cycles_and_the_base_crosses_once():
    parked, resident = Trainer(FakeDevice()), Trainer(FakeDevice())
    for _ in range(20):
        parked.cycle()
        assert parked.step() == resident.step()
        assert same(parked.state, resident.state)
    assert parked.first.weight is parked.second.weight
    assert parked.weights.parts[0].host_bytes() == 144
    written = sum(t.nbytes for t in parked.state) - 144
    cold = sum(t.nbytes for t in [*parked.parameters, parked.scale])
    assert parked.device.copied_out_bytes == 144 + cold + 19 * written


def test_parking_a_cold_optimizer_creates_no_state():
    trainer = Trainer(FakeDevice())
    trainer.cycle()
    assert trainer.optimizer.state == {}


def test_step_counters_stay_where_they_are_and_parameters_are_the_same_objects():
    trainer = Trainer(FakeDevice())
    trainer.step()
    before = {p: dict(state) for p, state in trainer.optimizer.state.items()}
    steps = [state["step"] for state in before.values()]
    for part in trainer.weights.parts:
        part.park(copy=True)
    assert [float(step) for step in steps] == [1, 1, 1]
    for part in trainer.weights.parts:
        part.unpark()
    for parameter, state in trainer.optimizer.state.items():
        assert state.keys() == before[parameter].keys()
        assert all(value is before[parameter][name] for name, value in state.items())


def test_parked_bytes_have_no_gradients_in_them():
    trainer = Trainer(FakeDevice())
    trainer.step()
    assert all(parameter.grad is None for parameter in trainer.parameters)
    gradients = sum(parameter.nbytes for parameter in trainer.parameters)
    parked = sum(part.park(copy=True).num_bytes for part in trainer.weights.parts)
    assert parked == 3 * gradients + trainer.frozen.nbytes + trainer.scale.nbytes


def test_a_second_reference_to_replaced_moments_is_named_with_its_bytes():
    trainer = Trainer(FakeDevice())
    trainer.step()
    trainer.cycle()
    assert trainer.weights.leaked_bytes() == {}
    planted = trainer.optimizer.state[trainer.first.weight]["exp_avg"]
    trainer.optimizer.state[trainer.first.weight]["exp_avg"] = planted.clone()
    assert trainer.weights.leaked_bytes() == {"moments": planted.nbytes}
    with pytest.raises(FakeDeviceError, match=r"\('moment 0', 144\)"):
        trainer.cycle()
    del planted
    assert trainer.weights.leaked_bytes() == {}


def test_a_second_reference_to_parked_memory_keeps_none_of_it():
    device = FakeDevice()
    part, tensors = some_part(device)
    planted = [tensor.detach() for tensor in tensors]
    part.park(copy=True)
    device.require_used(0)
    assert len(planted) == 4


# --- failures at every operation ------------------------------------------------------------------


def with_fault_at_each(device: FakeDevice, move: Callable[[], object]) -> Iterator[int]:
    """Yields after each failed try of a move, until it succeeds."""
    number = 0
    while True:
        device.operations_until_fault = number
        try:
            move()
        except InjectedError:
            yield number
            number += 1
        else:
            break
    device.operations_until_fault = None


def test_a_park_that_fails_anywhere_leaves_the_part_as_it_was_and_can_be_tried_again():
    device = FakeDevice(capacity_bytes=108)
    part, tensors = some_part(device)
    expected = [tensor.clone() for tensor in tensors]
    failures = 0
    for _ in with_fault_at_each(device, lambda: part.park(copy=True)):
        failures += 1
        assert part.is_resident
        device.require_idle()
        device.require_used(108)
        assert same(tensors, expected)
    assert failures == 6, "three copies and three releases"
    part.unpark()
    assert same(tensors, expected)


def test_an_unpark_that_fails_anywhere_leaves_the_part_parked_and_can_be_tried_again():
    device = FakeDevice(capacity_bytes=108)
    part, tensors = some_part(device)
    expected = [tensor.clone() for tensor in tensors]
    part.park(copy=True)
    failures = 0
    for _ in with_fault_at_each(device, part.unpark):
        failures += 1
        assert not part.is_resident
        device.require_idle()
        device.require_used(0)
        assert torch.equal(part.read(tensors[0]), expected[0])
    assert failures == 6, "three allocations and three copies"
    assert same(tensors, expected)


def test_a_device_that_is_full_leaves_the_part_parked():
    device = FakeDevice(capacity_bytes=108)
    part, tensors = some_part(device)
    expected = [tensor.clone() for tensor in tensors]
    part.park(copy=True)
    intruder = device.put("intruder", random(5))
    with pytest.raises(FakeDeviceError, match="out of memory"):
        part.unpark()
    device.require_used(20)
    del intruder
    part.unpark()
    assert same(tensors, expected)


def test_a_copy_that_failed_half_way_is_not_relied_on():
    device = FakeDevice()
    part, tensors = some_part(device)
    part.park(copy=True)
    part.unpark()
    tensors[0].add_(1)
    expected = [tensor.clone() for tensor in tensors]
    device.operations_until_fault = 1
    with pytest.raises(InjectedError):
        part.park(copy=True)
    assert part.park(copy=False) == Moved(108)
    part.unpark()
    assert same(tensors, expected)


def test_a_part_whose_shared_copy_was_spoilt_says_so_instead_of_giving_junk():
    device = FakeDevice()
    host = HostArena(HostLimit(64 * GIB, "a test"), pin=False)
    parts, tensors = [], []
    for name in ("rollout.adapter", "train.adapter"):
        tensor = device.put(name, random(100))
        declared = TensorComponent(name, lambda t=tensor: [t], lambda: 0, host_key="adapter")
        parts.append(weights_on(device, declared, host=host).parts[0])
        tensors.append(tensor)
    parts[0].park(copy=True)
    device.operations_until_fault = 0
    with pytest.raises(InjectedError):
        parts[1].park(copy=True)
    with pytest.raises(ResidencyError, match=r"host copy of rollout.adapter is spoilt"):
        parts[0].unpark()
    parts[1].park(copy=True)
    parts[0].unpark()
    assert torch.equal(tensors[0], random(100))


def test_a_full_host_leaves_the_part_on_the_device():
    device = FakeDevice()
    tensor = device.put("tensor", random(100))
    declared = TensorComponent("part", lambda: [tensor], lambda: FROZEN)
    host = HostArena(HostLimit(400, "a test"), pin=False)
    (part,) = weights_on(device, declared, host=host).parts
    with pytest.raises(ResidencyError, match="parking part needs"):
        part.park(copy=True)
    assert part.is_resident
    assert torch.equal(tensor, random(100))


def test_a_part_that_came_back_only_half_is_filled_whole_the_next_time(monkeypatch):
    """Two faults: the copy in fails, and so does giving the memory back."""
    device = FakeDevice()
    part, tensors = some_part(device)
    expected = [tensor.clone() for tensor in tensors]
    part.park(copy=True)
    with monkeypatch.context() as faults:
        faults.setattr(device, "copy_in", broken)
        faults.setattr(device, "empty", broken)
        with pytest.raises(InjectedError):
            part.unpark()
    part.unpark()
    assert same(tensors, expected)


def broken(*_: object) -> None:
    raise InjectedError


def test_a_written_component_may_not_share_a_host_copy():
    device = FakeDevice()
    frozen, written = (device.put(f"tensor {n}", random(8, seed=n)) for n in range(2))
    weights = weights_on(
        device,
        TensorComponent("a", lambda: [frozen], lambda: FROZEN, host_key="same"),
        TensorComponent("b", lambda: [written], lambda: 3, host_key="same"),
    )
    first, second = weights.parts
    first.park(copy=True)
    with pytest.raises(ResidencyError, match="b is written, and a relies on the same host copy"):
        second.park(copy=True)
    assert second.is_resident
