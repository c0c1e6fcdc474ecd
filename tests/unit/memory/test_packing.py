"""Small storages come back as one: the same objects, bits and bytes, and nobody is left behind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from fake_device import FakeDevice, FakeDeviceError, InjectedError
from torch import Tensor, UntypedStorage, nn

from unirl.core.components import FROZEN, Moved, Parking, TensorComponent
from unirl.core.errors import ResidencyError
from unirl.memory import packing
from unirl.memory.hostmem import GIB, HostArena, HostLimit
from unirl.memory.movers import RoleWeights
from unirl.memory.parts import TensorPart
from unirl.memory.sharing import share_base
from unirl.train.optimizer import moment_tensors

PLACE = packing.PLACE_BYTES
FLOATS = PLACE // 4


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def small(count: int = 3) -> list[Tensor]:
    """Of 512, 1024, 1536, ... bytes."""
    return [random(FLOATS * (n + 1), seed=n) for n in range(count)]


def arena() -> HostArena:
    return HostArena(HostLimit(64 * GIB, "a test"), pin=False)


def part_of(
    tensors: list[Tensor],
    device: FakeDevice,
    host: HostArena | None = None,
    name: str = "part",
    parking: Parking = Parking.COPY,
) -> TensorPart:
    for number, tensor in enumerate(tensors):
        device.put(f"{name} {number}", tensor)
    declared = TensorComponent(
        name, lambda: tensors, lambda: FROZEN, parking=parking, host_key="base"
    )
    (part,) = RoleWeights([declared], host or arena(), device_of=lambda _: device).parts
    assert isinstance(part, TensorPart)
    return part


def there_and_back(part: TensorPart) -> None:
    part.park(copy=True)
    part.unpark()


def storages(tensors: Sequence[Tensor]) -> list[UntypedStorage]:
    """Each once, in order."""
    return list(dict.fromkeys(tensor.untyped_storage() for tensor in tensors))


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# --- what is packed -------------------------------------------------------------------------------


def test_small_storages_come_back_as_one_of_the_same_bytes():
    device = FakeDevice(capacity_bytes=6 * PLACE)
    tensors = small()
    expected = [tensor.clone() for tensor in tensors]
    part = part_of(tensors, device)
    for cycle in range(3):
        moved = part.park(copy=cycle == 0)
        assert moved == (Moved(0, 6 * PLACE) if cycle else Moved(6 * PLACE))
        device.require_used(0)
        assert part.unpark() == Moved(6 * PLACE)
        device.require_used(6 * PLACE)
        assert part.num_bytes() == part.host_bytes() == 6 * PLACE
        assert same(tensors, expected)
    assert len(storages(tensors)) == 1
    assert [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors] == [0, 512, 1536]


def test_a_packed_component_moves_in_one_copy_and_one_release():
    device = FakeDevice()
    tensors = small(50)
    part = part_of(tensors, device)
    there_and_back(part)
    device.operations_until_fault = 4  # copy out, empty, allocate, copy in
    there_and_back(part)
    with pytest.raises(InjectedError):
        part.park(copy=False)


@pytest.mark.parametrize("parking", [Parking.COPY, Parking.DROP])
def test_parameters_keep_shape_stride_offset_and_identity(parking):
    device = FakeDevice()
    wide = random(3 * FLOATS)
    tensors: list[Tensor] = [
        nn.Parameter(random(4, FLOATS)),
        nn.Parameter(random(FLOATS, 4).T, requires_grad=False),
        nn.Parameter(torch.empty(0)),
    ]
    tensors[2].data = wide[FLOATS:]  # begins within its storage
    del wide
    before = [(t, t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors]
    part = part_of(tensors, device, parking=parking)
    there_and_back(part)
    assert len(storages(tensors)) == 1
    assert tensors[2].storage_offset() * 4 == 2 * 4 * PLACE + PLACE
    for tensor, (object_before, *rest) in zip(tensors, before, strict=True):
        assert tensor is object_before
        assert rest == [tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad]


def test_different_dtypes_share_a_storage():
    device = FakeDevice()
    tensors = [random(FLOATS), random(2 * FLOATS).bfloat16(), torch.arange(FLOATS // 2)]
    expected = [tensor.clone() for tensor in tensors]
    there_and_back(part_of(tensors, device))
    assert len(storages(tensors)) == 1
    assert same(tensors, expected)


def test_sizes_off_the_grid_and_large_ones_stay_alone_and_end_a_run(monkeypatch):
    monkeypatch.setattr(packing, "SMALL_BYTES", 8 * PLACE)
    device = FakeDevice()
    sizes = [FLOATS, FLOATS, FLOATS + 1, FLOATS, 0, FLOATS, FLOATS, 8 * FLOATS, FLOATS]
    tensors = [random(size, seed=seed) for seed, size in enumerate(sizes)]
    expected = [tensor.clone() for tensor in tensors]
    part = part_of(tensors, device)
    for _ in range(2):
        there_and_back(part)
        assert same(tensors, expected)
    at = [storages(tensors).index(tensor.untyped_storage()) for tensor in tensors]
    assert at == [0, 0, 1, 2, 3, 4, 4, 5, 6]


def test_a_whole_does_not_grow_without_limit(monkeypatch):
    monkeypatch.setattr(packing, "WHOLE_BYTES", 4 * PLACE)
    tensors = [random(FLOATS, seed=seed) for seed in range(10)]
    expected = [tensor.clone() for tensor in tensors]
    there_and_back(part_of(tensors, FakeDevice()))
    assert [storage.nbytes() for storage in storages(tensors)] == [2048, 2048, 1024]
    assert same(tensors, expected)


def test_tied_parameters_stay_tied():
    device = FakeDevice()
    first, second = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)
    second.weight.data = first.weight.data
    other = nn.Parameter(random(FLOATS))
    tensors: list[Tensor] = [first.weight, other, second.weight, first.weight]
    part = part_of(tensors, device)
    there_and_back(part)
    there_and_back(part)
    assert len(storages(tensors)) == 1
    assert part.num_bytes() == 2 * PLACE
    first.weight.data.fill_(7)
    assert second.weight.eq(7).all()
    assert other.ne(7).all()


def test_moments_that_appear_after_the_first_step_are_packed_on_their_first_return():
    parameters = [nn.Parameter(tensor) for tensor in small()]
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    declared = TensorComponent("moments", lambda: moment_tensors(optimizer), lambda: None)
    (part,) = RoleWeights([declared], arena()).parts
    part.park(copy=True)
    part.unpark()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = {parameter: dict(optimizer.state[parameter]) for parameter in parameters}
    expected = [moment.clone() for moment in moment_tensors(optimizer)]
    for _ in range(2):
        part.park(copy=True)
        part.unpark()
    assert len(storages(moment_tensors(optimizer))) == 1
    assert same(moment_tensors(optimizer), expected)
    for parameter, state in states.items():
        assert all(optimizer.state[parameter][name] is value for name, value in state.items())


def test_training_with_packed_weights_and_moments_is_training_without_bit_for_bit():
    def train(*, parks: bool) -> list[Tensor]:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Tanh(), nn.Linear(16, 32))
        parameters = list(network.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=0.05)
        weights = RoleWeights(
            [
                TensorComponent("weights", lambda: parameters, lambda: None),
                TensorComponent("moments", lambda: moment_tensors(optimizer), lambda: None),
            ],
            arena(),
        )
        for number in range(10):
            network(random(4, 32, seed=number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for part in weights.parts if parks else ():
                part.park(copy=True)
            for part in weights.parts if parks else ():
                part.unpark()
        packed = len(storages(parameters)) < len(parameters)
        assert packed is parks
        return [*parameters, *moment_tensors(optimizer)]

    assert same(train(parks=True), train(parks=False))


# --- nobody is left behind ------------------------------------------------------------------------


@pytest.mark.parametrize("alias", ["view", "detach", "data", "parameter"])
def test_a_tensor_nobody_declared_sees_the_weights_when_they_are_back(alias):
    device = FakeDevice()
    tensors = small(4)
    match alias:
        case "view":
            other = tensors[1][:8]
        case "detach":
            other = tensors[1].detach()[:8]
        case "data":
            other = tensors[1].data[:8]
        case _:
            other = nn.Parameter(tensors[1])[:8]
    part = part_of(tensors, device)
    there_and_back(part)
    tensors[1][0] = 42
    assert other[0] == 42
    assert torch.equal(other[1:], small(4)[1][1:8])
    assert len(storages(tensors)) == 3, "its storage stays, those after it are packed"


def test_what_an_alias_held_back_is_packed_once_it_is_gone():
    tensors = small(2)
    alias = tensors[0].detach()
    part = part_of(tensors, FakeDevice())
    there_and_back(part)
    assert len(storages(tensors)) == 2
    del alias
    there_and_back(part)
    assert len(storages(tensors)) == 1


def test_a_network_that_borrows_the_base_goes_on_seeing_it():
    owner, borrower = (nn.Linear(32, 16).requires_grad_(False) for _ in range(2))
    share_base(borrower, owner)
    part = part_of(list(owner.parameters()), FakeDevice())
    there_and_back(part)
    owner.weight.fill_(3)
    assert borrower.weight.eq(3).all()


def test_a_graph_that_waits_for_its_backward_keeps_its_weights():
    weight = nn.Parameter(random(FLOATS))
    held = [weight, nn.Parameter(random(FLOATS, seed=1))]
    loss = (weight.detach().requires_grad_() * 2 * weight).sum()
    part = part_of(held, FakeDevice())  # type: ignore[arg-type]
    there_and_back(part)
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, 2 * random(FLOATS))


class Wrapped(Tensor):
    """A subclass: who knows what else it keeps."""


@pytest.mark.parametrize("kind", ["view", "subclass", "inference"])
def test_tensors_that_are_more_than_a_place_stay_where_they_are(kind):
    tensors = small(2)
    match kind:
        case "view":
            tensors.append(tensors[0].view(2, -1))
        case "subclass":
            tensors[0] = tensors[0].as_subclass(Wrapped)
        case _:
            with torch.inference_mode():
                tensors[0] = random(FLOATS)
    expected = [tensor.clone() for tensor in tensors]
    before = storages(tensors)
    there_and_back(part_of(tensors, FakeDevice()))
    assert storages(tensors) == before
    assert same(tensors, expected)


def test_a_tensor_that_left_its_place_is_told_with_its_bytes():
    device = FakeDevice()
    tensors = small()
    declared = TensorComponent("part", lambda: tensors, lambda: None)
    weights = RoleWeights([declared], arena(), device_of=lambda _: device)
    (part,) = weights.parts
    part.park(copy=True)
    part.unpark()
    assert weights.leaked_bytes() == {}
    tensors[1] = tensors[1].clone()
    assert weights.leaked_bytes() == {"part": 2 * PLACE}
    expected = [tensor.clone() for tensor in tensors]
    part.park(copy=True)
    part.unpark()
    assert same(tensors, expected), "and all is moved all the same"


# --- the host copy stays in pieces ----------------------------------------------------------------


def test_a_packed_and_an_unpacked_component_share_a_host_copy():
    host, device = arena(), FakeDevice()
    train, rollout = small(5), small(5)
    first = part_of(train, device, host, "train.base")
    second = part_of(rollout, device, host, "rollout.base")
    first.park(copy=True)
    first.unpark()
    assert (len(storages(train)), len(storages(rollout))) == (1, 5)
    assert second.park(copy=False) == Moved(0, 15 * PLACE), "recognised by its pieces"
    assert first.park(copy=False) == Moved(0, 15 * PLACE)
    assert torch.equal(first.read(train[3]), small(5)[3])
    assert torch.equal(second.read(rollout[3]), small(5)[3])
    first.unpark()
    second.unpark()
    assert same([*train, *rollout], small(5) * 2)
    assert device.copied_out_bytes == 15 * PLACE
    assert len(storages(rollout)) == 1


@pytest.mark.parametrize("position", range(0, 200, 13))
def test_small_weights_are_compared_whole_although_they_are_packed(position):
    host, device = arena(), FakeDevice()
    train, rollout = ([*small(200), random(5)] for _ in range(2))
    first = part_of(train, device, host, "train.base")
    second = part_of(rollout, device, host, "rollout.base")
    first.park(copy=True)
    second.park(copy=False)
    second.unpark()
    assert len(storages(rollout)) == 2
    rollout[-1] = rollout[-1].clone()  # never parked, so all of them are compared again
    rollout[position][7] += 1
    with pytest.raises(ResidencyError, match="does not hold what"):
        second.park(copy=False)


def test_a_packed_tensor_is_read_from_the_host_while_it_is_parked():
    tensors = small(5)
    part = part_of(tensors, FakeDevice())
    there_and_back(part)
    part.park(copy=True)
    assert all(torch.equal(part.read(t), e) for t, e in zip(tensors, small(5), strict=True))


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cycles", [0, 1])
def test_an_unpark_that_fails_anywhere_leaves_all_parked_and_can_be_tried_again(cycles):
    """Before anything is packed, and when it is."""
    device = FakeDevice()
    tensors = [*small(3), random(FLOATS + 1), *small(2)]
    expected = [tensor.clone() for tensor in tensors]
    part = part_of(tensors, device)
    for _ in range(cycles):
        there_and_back(part)
    part.park(copy=True)
    before = storages(tensors)
    for number in range(6):  # three allocations and three copies
        device.operations_until_fault = number
        with pytest.raises(InjectedError):
            part.unpark()
        assert not part.is_resident
        assert storages(tensors) == before
        device.require_idle()
        device.require_used(0)
        assert torch.equal(part.read(tensors[1]), expected[1])
    device.operations_until_fault = None
    part.unpark()
    assert same(tensors, expected)
    assert len(storages(tensors)) == 3


@pytest.mark.parametrize("fault", range(8))  # four copies and four releases
def test_a_park_that_fails_anywhere_needs_no_more_memory_to_stay(fault):
    tensors = [*small(3), random(FLOATS + 1)]
    total = sum(tensor.nbytes for tensor in tensors)
    device = FakeDevice(capacity_bytes=total)
    part = part_of(tensors, device)
    device.operations_until_fault = fault
    with pytest.raises(InjectedError):
        part.park(copy=True)
    assert part.is_resident
    for _ in range(2):
        device.require_used(total)
        assert same(tensors, [*small(3), random(FLOATS + 1)])
        there_and_back(part)


def test_a_device_without_room_for_the_whole_leaves_all_parked():
    device = FakeDevice(capacity_bytes=6 * PLACE)
    tensors = small()
    part = part_of(tensors, device)
    part.park(copy=True)
    intruder = device.put("intruder", random(1))
    with pytest.raises(FakeDeviceError, match="out of memory"):
        part.unpark()
    device.require_used(4)
    del intruder
    part.unpark()
    assert same(tensors, small())


def test_an_interrupt_while_tensors_are_pointed_to_their_places_puts_all_of_them_back(monkeypatch):
    device = FakeDevice()
    tensors = small()
    part = part_of(tensors, device)
    part.park(copy=True)
    before, calls = storages(tensors), iter(range(100))
    to_place = packing._at

    def interrupted(place: packing.Place, whole: UntypedStorage) -> Tensor:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return to_place(place, whole)

    with monkeypatch.context() as faults:
        faults.setattr(packing, "_at", interrupted)
        with pytest.raises(KeyboardInterrupt):
            part.unpark()
    assert storages(tensors) == before
    device.require_used(0)
    part.unpark()
    assert same(tensors, small())
    assert len(storages(tensors)) == 1
