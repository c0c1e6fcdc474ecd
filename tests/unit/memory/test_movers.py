"""Parking and restoring weights: nothing changes but where the bytes are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unirl.core.components import (
    FROZEN,
    VOID,
    Component,
    Moved,
    Parking,
    RebuiltComponent,
    TensorComponent,
    Version,
    Void,
)
from unirl.core.errors import ResidencyError
from unirl.memory.hostmem import GIB, HostArena, HostLimit
from unirl.memory.movers import RoleWeights, module_components, own_storages
from unirl.train.optimizer import moment_tensors

FLOAT = 4


class Counter:
    """A version that tests turn forward."""

    def __init__(self) -> None:
        self.value = 0

    def __call__(self) -> int:
        return self.value


class Mover:
    """A role's weights, moved as a planner does: it copies out what the host does not have."""

    def __init__(self, components: Sequence[Component], host: HostArena | None = None) -> None:
        self.weights = RoleWeights(components, host or arena())
        self._host_versions: dict[str, Version | Void] = {}

    def offload(self) -> Moved:
        return total([self.park(part) for part in self.weights.parts])

    def park(self, part) -> Moved:
        version = part.version()
        is_current = version != Version(None) and self._host_versions.get(part.name) == version
        moved = part.park(copy=not is_current)
        self._host_versions[part.name] = version
        return moved

    def onload(self) -> Moved:
        return total([part.unpark() for part in self.weights.parts])


def total(moves: Sequence[Moved]) -> Moved:
    return Moved(sum(m.num_bytes for m in moves), sum(m.dropped_bytes for m in moves))


def arena() -> HostArena:
    return HostArena(HostLimit(64 * GIB, "a test"), pin=False)


def component(
    tensors: list[Tensor], version: Callable[[], int | None] = lambda: FROZEN, name: str = "some"
) -> TensorComponent:
    return TensorComponent(name, lambda: tensors, version)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def failing(*_: object) -> int:
    raise OSError("no memory left")


class TiedNet(nn.Module):
    """Two layers that share their weight, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("scale", random(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale.sum()


# --- round trips ----------------------------------------------------------------------------------


def test_weights_come_back_bit_for_bit_over_cycles_as_the_same_objects():
    net = TiedNet()
    parameters = list(net.parameters())
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x = random(2, 6)
    output = net(x)
    mover = Mover(module_components("net", net))
    for _ in range(3):
        mover.offload()
        assert all(p.untyped_storage().nbytes() == 0 for p in parameters)
        mover.onload()
        assert [id(p) for p in net.parameters()] == [id(p) for p in parameters]
        assert all(torch.equal(v, before[n]) for n, v in net.state_dict().items())
        assert torch.equal(net(x), output)
    assert net.first.weight is net.second.weight


def test_values_that_are_not_numbers_keep_their_bits():
    bits = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000, 0x7F800123], dtype=torch.int32)
    tensor = bits.view(torch.float32)
    mover = Mover([component([tensor])])
    mover.offload()
    mover.onload()
    assert tensor.view(torch.int32).tolist() == bits.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_every_dtype_is_moved(dtype):
    tensor = (random(33) * 3).to(dtype)
    expected = tensor.clone()
    mover = Mover([component([tensor])])
    assert mover.offload() == Moved(33 * tensor.element_size())
    mover.onload()
    assert torch.equal(tensor, expected)


def test_tied_weights_and_views_of_one_storage_are_moved_once():
    base = random(10, 10)
    tensors = [base, base[2:4], base.t(), base.detach()]
    expected = [tensor.clone() for tensor in tensors]
    mover = Mover([component(tensors)])
    assert mover.offload().num_bytes == 100 * FLOAT
    assert mover.onload().num_bytes == 100 * FLOAT
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    base[2, 0] = 7
    assert tensors[1][0, 0] == tensors[2][0, 2] == tensors[3][2, 0] == 7


def test_buffers_are_copied_each_time_since_a_forward_may_write_them():
    net = TiedNet()
    mover = Mover(module_components("net", net))
    mover.offload()
    mover.onload()
    net.scale.add_(1)
    expected = net.scale.clone()
    assert mover.offload().num_bytes == 3 * FLOAT
    mover.onload()
    assert torch.equal(net.scale, expected)


def test_gradients_are_left_where_they_are():
    net = TiedNet()
    net(random(2, 6)).sum().backward()
    gradient = net.first.weight.grad
    assert gradient is not None
    expected = gradient.clone()
    mover = Mover(module_components("net", net))
    mover.offload()
    assert torch.equal(gradient, expected)
    mover.onload()
    assert net.first.weight.grad is gradient


def test_both_directions_are_idempotent():
    tensor = random(5)
    mover = Mover([component([tensor])])
    assert mover.onload() == Moved(0)
    mover.offload()
    assert mover.offload() == Moved(0)
    mover.onload()
    assert mover.onload() == Moved(0)


def test_a_role_without_weights_moves_nothing():
    mover = Mover([])
    assert (mover.offload(), mover.onload()) == (Moved(0), Moved(0))


def test_empty_tensors_are_allowed():
    tensor = torch.empty(0, 4)
    mover = Mover([component([tensor])])
    assert mover.offload() == Moved(0)
    mover.onload()
    assert tensor.shape == (0, 4)


# --- kinds of parking -----------------------------------------------------------------------------


def test_kept_components_never_move_and_do_not_make_the_role_parked():
    kept, other = random(5), random(6, seed=1)
    declared = TensorComponent("kept", lambda: [kept], lambda: FROZEN, parking=Parking.KEEP)
    mover = Mover([declared, component([other])])
    assert mover.offload() == Moved(6 * FLOAT)
    part = mover.weights.parts[0]
    assert part.is_resident
    assert (part.num_bytes(), part.host_bytes()) == (20, 0)
    assert kept.untyped_storage().nbytes() == 20
    assert mover.onload() == Moved(6 * FLOAT)
    assert mover.weights.is_resident


def dropping(tensor: Tensor, version: Callable[[], int | None]) -> Mover:
    return Mover([TensorComponent("scratch", lambda: [tensor], version, parking=Parking.DROP)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dropped_contents_come_back_as_nan(dtype):
    tensor = random(9).to(dtype)
    mover = dropping(tensor, lambda: 0)
    assert mover.offload() == Moved(0, tensor.nbytes)
    assert mover.weights.parts[0].host_bytes() == 0
    assert mover.onload() == Moved(0)
    assert tensor.isnan().all()


def test_dropped_contents_are_void_until_they_are_written():
    tensor, version = random(9), Counter()
    mover = dropping(tensor, version)
    (part,) = mover.weights.parts
    assert part.version() == Version(0)
    mover.offload()
    mover.onload()
    assert part.version() is VOID
    with pytest.raises(ResidencyError, match="scratch was to be read, but its contents were drop"):
        mover.weights.on_host(tensor)
    mover.offload()
    with pytest.raises(ResidencyError, match="scratch was to be read, but its contents were drop"):
        mover.weights.on_host(tensor)
    mover.onload()
    tensor.fill_(1)
    version.value += 1
    assert part.version() == Version(1)
    assert torch.equal(mover.weights.on_host(tensor), torch.ones(9))


def test_a_part_carries_what_its_component_declares():
    declared = TensorComponent(
        "train.base", lambda: [random(3)], lambda: None, written_by="push", host_key="base"
    )
    (part,) = Mover([declared]).weights.parts
    assert (part.name, part.written_by, part.host_key) == ("train.base", "push", "base")
    assert (part.parking, part.version()) == (Parking.COPY, Version(None))


def test_nobody_writes_a_modules_weights_and_a_forward_may_write_its_buffers():
    weights, buffers = Mover(module_components("net", TiedNet())).weights.parts
    assert (weights.name, weights.written_by) == ("net.weights", "nobody")
    assert (buffers.name, buffers.written_by) == ("net.buffers", "forward")
    assert (weights.version(), buffers.version()) == (Version(FROZEN), Version(None))


def test_sizes_are_known_on_the_device_and_off_it():
    tensor = random(5)
    mover = Mover([component([tensor, tensor.view(5, 1)])])
    (part,) = mover.weights.parts
    assert (part.num_bytes(), part.host_bytes()) == (20, 0)
    mover.offload()
    assert (part.num_bytes(), part.host_bytes()) == (20, 20)
    mover.onload()
    assert (part.num_bytes(), part.host_bytes()) == (20, 20)


# --- the whole role -------------------------------------------------------------------------------


def test_a_role_is_resident_when_none_of_its_parts_is_parked():
    mover = Mover([component([random(2)], name="a"), component([random(2)], name="b")])
    weights = mover.weights
    weights.require_resident("the engine", "generate")
    for part in weights.parts:
        part.park(copy=True)
        assert not weights.is_resident
    with pytest.raises(
        ResidencyError,
        match=r"the engine was asked to generate while parked \(a, b are on the host\)",
    ):
        weights.require_resident("the engine", "generate")
    weights.parts[0].unpark()
    with pytest.raises(ResidencyError, match=r"parked \(b are on the host\)"):
        weights.require_resident("the engine", "generate")


def test_what_is_no_component_is_freed_before_anything_is_parked():
    tensor, gathered = random(3), [random(100)]

    def settle() -> None:
        assert tensor.untyped_storage().nbytes() == 12, "called before the tensors go"
        gathered.clear()

    weights = RoleWeights([component([tensor])], arena(), before_parking=settle)
    weights.parts[0].park(copy=True)
    assert gathered == []


def test_what_is_no_component_is_freed_before_a_rebuilt_part_goes():
    log = []
    session = RebuiltComponent("session", lambda: log.append("drop") or 1, lambda: 1, lambda: 1)
    weights = RoleWeights([session], arena(), before_parking=lambda: log.append("settle"))
    weights.parts[0].park(copy=False)
    assert log == ["settle", "drop"]


# --- reading without moving -----------------------------------------------------------------------


def test_values_are_read_on_the_device_and_off_it_and_nothing_moves():
    base = random(4, 6)
    tensors = [base, base.t(), base[1:3, 2:], random(3, seed=1).to(torch.bfloat16)]
    expected = [tensor.clone() for tensor in tensors]
    mover = Mover([component(tensors[:3], name="a"), component(tensors[3:], name="b")])
    for _ in range(2):
        read = [mover.weights.on_host(tensor) for tensor in tensors]
        assert all(torch.equal(a, b) for a, b in zip(read, expected, strict=True))
        mover.offload()
    assert base.untyped_storage().nbytes() == 0
    mover.onload()
    assert torch.equal(base, expected[0])


def test_what_was_read_is_a_copy():
    tensor = random(4)
    expected = tensor.clone()
    mover = Mover([component([tensor])])
    mover.weights.on_host(tensor).zero_()
    mover.offload()
    mover.weights.on_host(tensor).zero_()
    mover.onload()
    assert torch.equal(tensor, expected)


def test_a_parameter_is_read_without_its_graph():
    net = TiedNet()
    mover = Mover(module_components("net", net))
    assert not mover.weights.on_host(net.first.weight).requires_grad
    mover.offload()
    assert not mover.weights.on_host(net.first.weight).requires_grad


def test_a_tensor_that_nobody_declares_is_not_read():
    mover = Mover([component([random(3)])])
    with pytest.raises(ResidencyError, match=r"shape \(2, 2\).*no component of some declares it"):
        mover.weights.on_host(random(2, 2))


def test_moments_that_are_newer_than_the_last_look_are_read():
    net = TiedNet()
    optimizer, mover, version = optimizer_mover(net)
    mover.weights.on_host(net.first.weight)
    train_step(net, optimizer, version)
    moment = optimizer.state[net.first.weight]["exp_avg"]
    assert torch.equal(mover.weights.on_host(moment), moment)


# --- what is copied -------------------------------------------------------------------------------


def test_frozen_weights_are_copied_to_the_host_once_and_dropped_afterwards():
    tensor = random(25)
    mover = Mover([component([tensor])])
    assert mover.offload() == Moved(100, 0)
    mover.onload()
    for _ in range(2):
        assert mover.offload() == Moved(0, 100)
        assert mover.onload() == Moved(100)


def test_written_weights_are_copied_again_and_unwritten_ones_are_not():
    tensor, version = random(25), Counter()
    mover = Mover([component([tensor], version)])
    mover.offload()
    mover.onload()
    assert mover.offload() == Moved(0, 100)
    mover.onload()
    tensor.mul_(2)
    version.value += 1
    expected = tensor.clone()
    assert mover.offload() == Moved(100, 0)
    mover.onload()
    assert torch.equal(tensor, expected)


def test_a_tensor_that_is_new_is_copied_although_the_version_did_not_change():
    tensors = [random(5)]
    mover = Mover([component(tensors)])
    mover.offload()
    mover.onload()
    tensors.append(random(7, seed=1))
    expected = tensors[1].clone()
    assert mover.offload() == Moved(48)
    mover.onload()
    assert torch.equal(tensors[1], expected)


# --- the optimizer --------------------------------------------------------------------------------


def optimizer_mover(
    net: nn.Module, host: HostArena | None = None
) -> tuple[torch.optim.AdamW, Mover, Counter]:
    optimizer, version = torch.optim.AdamW(net.parameters()), Counter()
    moments = TensorComponent("moments", lambda: moment_tensors(optimizer), version)
    trained = TensorComponent("trained", lambda: list(net.parameters()), version)
    return optimizer, Mover([trained, moments], host), version


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, version: Counter) -> None:
    net(random(2, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    version.value += 1


def test_a_cold_optimizer_stays_cold():
    optimizer, mover, _ = optimizer_mover(TiedNet())
    mover.offload()
    mover.onload()
    assert len(optimizer.state) == 0


def test_moments_move_and_step_counters_stay():
    net = TiedNet()
    optimizer, mover, version = optimizer_mover(net)
    train_step(net, optimizer, version)
    state = optimizer.state[net.first.weight]
    step, moment = state["step"], state["exp_avg"]
    expected = moment.clone()
    mover.offload()
    assert moment.untyped_storage().nbytes() == 0
    assert float(step) == 1
    mover.onload()
    assert state["exp_avg"] is moment
    assert torch.equal(moment, expected)


def test_training_with_parking_between_all_steps_is_bitwise_training_without():
    def train(parks: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = TiedNet()
        optimizer, mover, version = optimizer_mover(net)
        for _ in range(4):
            if parks:
                mover.offload()
                mover.onload()
            train_step(net, optimizer, version)
        return [*net.parameters(), *moment_tensors(optimizer)]

    pairs = zip(train(parks=False), train(parks=True), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def test_a_partly_warm_optimizer_keeps_its_keys():
    net = TiedNet()
    optimizer, mover, version = optimizer_mover(net)
    net.first.weight.grad = torch.ones_like(net.first.weight)
    optimizer.step()
    version.value += 1
    before = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    mover.offload()
    mover.onload()
    assert {parameter: dict(state) for parameter, state in optimizer.state.items()} == before
    assert list(before) == [net.first.weight]


def test_the_host_copy_grows_when_moments_appear_and_is_the_same_memory_afterwards():
    net = TiedNet()
    host = arena()
    optimizer, mover, version = optimizer_mover(net, host)
    mover.offload()
    mover.onload()
    cold = host.num_bytes
    train_step(net, optimizer, version)
    mover.offload()
    warm = host.num_bytes
    copies = [host.copy_of(name) for name in ("trained", "moments")]
    addresses = [copy.spans[0].data_ptr() for copy in copies]
    assert warm > cold
    for _ in range(20):
        mover.onload()
        train_step(net, optimizer, version)
        mover.offload()
        assert host.num_bytes == warm
        assert [copy.spans[0].data_ptr() for copy in copies] == addresses


def test_moments_that_were_replaced_are_what_is_parked():
    net = TiedNet()
    optimizer, mover, version = optimizer_mover(net)
    train_step(net, optimizer, version)
    mover.offload()
    mover.onload()
    optimizer.load_state_dict(optimizer.state_dict())
    state = {name: value * 2 for name, value in optimizer.state[net.first.weight].items()}
    optimizer.state[net.first.weight] = state
    expected = state["exp_avg"].clone()
    mover.offload()
    mover.onload()
    assert torch.equal(state["exp_avg"], expected)


# --- parked weights -------------------------------------------------------------------------------


def test_a_parked_network_raises_instead_of_giving_junk():
    net = TiedNet()
    x = random(2, 6)
    mover = Mover(module_components("net", net))
    mover.offload()
    with pytest.raises(RuntimeError):
        net(x)
    mover.onload()
    assert net(x).isfinite().all()


def test_a_forgotten_reference_keeps_no_memory():
    tensor = random(1000)
    alias, view = tensor.detach(), tensor[:10]
    mover = Mover([component([tensor])])
    mover.offload()
    assert alias.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0


# --- failures -------------------------------------------------------------------------------------


@pytest.fixture
def moved_pair() -> tuple[Tensor, Tensor]:
    return random(5), random(6, seed=1)


def test_a_component_that_fails_to_park_stays_on_the_device_and_can_be_tried_again(moved_pair):
    first, second = moved_pair
    expected = [tensor.clone() for tensor in moved_pair]
    fails = False

    def tensors() -> list[Tensor]:
        if fails:
            raise OSError("gone")
        return [second]

    later = TensorComponent("second", tensors, lambda: FROZEN)
    mover = Mover([component([first], name="first"), later])
    parked, failing_part = mover.weights.parts
    parked.park(copy=True)
    fails = True
    with pytest.raises(OSError, match="gone"):
        failing_part.park(copy=True)
    assert failing_part.is_resident
    assert not parked.is_resident
    assert torch.equal(second, expected[1])
    fails = False
    mover.offload()
    mover.onload()
    assert all(torch.equal(a, b) for a, b in zip(moved_pair, expected, strict=True))


def test_a_rebuilt_part_that_fails_to_drop_counts_as_on_the_device():
    drops = [failing, lambda: 7]
    part = RebuiltComponent("session", lambda: drops.pop(0)(), lambda: 7, lambda: 7)
    mover = Mover([part])
    with pytest.raises(OSError, match="no memory"):
        mover.offload()
    assert mover.weights.is_resident
    assert mover.offload() == Moved(0, 7)


def test_a_rebuild_that_fails_can_be_tried_again():
    rebuilds = [failing, lambda: 7]
    mover = Mover([RebuiltComponent("session", lambda: 7, lambda: rebuilds.pop(0)(), lambda: 7)])
    mover.offload()
    with pytest.raises(OSError, match="no memory"):
        mover.onload()
    assert not mover.weights.is_resident
    assert mover.onload() == Moved(7)


def test_a_rebuilt_part_is_dropped_and_built_once_and_takes_no_host_memory():
    calls = []
    session = RebuiltComponent(
        "session",
        lambda: calls.append("drop") or 5,
        lambda: calls.append("rebuild") or 6,
        lambda: 6,
    )
    mover = Mover([session])
    (part,) = mover.weights.parts
    assert (part.name, part.parking, part.num_bytes()) == ("session", Parking.REBUILD, 6)
    assert (mover.offload(), mover.offload()) == (Moved(0, 5), Moved(0))
    assert (mover.onload(), mover.onload()) == (Moved(6), Moved(0))
    assert calls == ["drop", "rebuild"]
    assert part.host_bytes() == 0


def test_a_version_that_cannot_be_read_leaves_contents_that_would_be_dropped():
    tensor = random(5)
    mover = dropping(tensor, failing)
    with pytest.raises(OSError, match="no memory"):
        mover.weights.parts[0].park(copy=False)
    assert mover.weights.is_resident
    assert torch.equal(tensor, random(5))


def test_two_components_with_one_storage_are_refused_and_nothing_is_parked():
    tensor = random(4, 4)
    expected = tensor.clone()
    mover = Mover([component([tensor], name="one"), component([tensor.t()], name="two")])
    with pytest.raises(ResidencyError, match="two and one hold the same memory"):
        mover.offload()
    assert mover.weights.is_resident
    assert torch.equal(tensor, expected)


def test_memory_that_comes_into_a_second_component_later_is_refused_too(moved_pair):
    first, second = moved_pair
    late = [second]
    mover = Mover([component([first], name="one"), component(late, name="two")])
    mover.offload()
    mover.onload()
    late.append(first[:2])
    one, two = mover.weights.parts
    one.park(copy=True)
    with pytest.raises(ResidencyError, match="two and one hold the same memory"):
        two.park(copy=True)


def test_a_tensor_may_change_its_component():
    tensor, other = random(4), random(5, seed=1)
    one, two = [tensor, other], []
    mover = Mover([component(one, name="one"), component(two, name="two")])
    mover.offload()
    mover.onload()
    two.append(one.pop(0))
    assert mover.offload().num_bytes == 9 * FLOAT
    mover.onload()
    assert torch.equal(tensor, random(4))
    assert mover.weights.leaked_bytes() == {}


def test_two_components_of_one_name_are_both_parked_and_both_come_back(moved_pair):
    """Two scorers of one class declare the same names."""
    expected = [tensor.clone() for tensor in moved_pair]
    mover = Mover([component([tensor], name="same") for tensor in moved_pair])
    assert [part.name for part in mover.weights.parts] == ["same", "same#2"]
    for _ in range(2):
        mover.offload()
        mover.onload()
    assert all(torch.equal(a, b) for a, b in zip(moved_pair, expected, strict=True))


def test_a_component_on_two_devices_is_refused():
    mover = Mover([component([random(3), torch.empty(3, device="meta")])])
    with pytest.raises(ResidencyError, match="some lies on cpu and meta"):
        mover.offload()


def test_tensors_declared_as_rebuilt_are_refused():
    rebuilt = TensorComponent("odd", list, lambda: FROZEN, parking=Parking.REBUILD)
    with pytest.raises(ResidencyError, match="odd: tensors cannot be rebuilt"):
        Mover([rebuilt])


# --- storages that cannot be emptied --------------------------------------------------------------


def mapped_linear(folder: Path) -> nn.Linear:
    save_file({"weight": random(4, 4), "bias": random(4)}, folder / "weights.safetensors")
    net = nn.Linear(4, 4)
    net.load_state_dict(load_file(folder / "weights.safetensors"), assign=True)
    return net


def test_weights_mapped_from_a_file_are_refused_until_they_own_their_memory(tmp_path):
    net = mapped_linear(tmp_path)
    parameters = list(net.parameters())
    expected = [p.detach().clone() for p in parameters]
    mover = Mover(module_components("net", net))
    with pytest.raises(ResidencyError, match="own_storages"):
        mover.offload()
    own_storages(net)
    assert net.weight is parameters[0]
    mover.offload()
    mover.onload()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), expected, strict=True))


def test_a_storage_that_numpy_looks_at_is_refused_instead_of_pulled_from_under_it():
    tensor = random(4)
    array = tensor.numpy()
    with pytest.raises(ResidencyError):
        Mover([component([tensor])]).offload()
    assert array.tolist() == tensor.tolist()


def test_owning_storages_keeps_ties_and_values():
    net = TiedNet()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    own_storages(net)
    assert net.first.weight is net.second.weight
    assert all(torch.equal(v, before[n]) for n, v in net.state_dict().items())


def test_owning_storages_keeps_the_values_of_every_view():
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = nn.Parameter(random(4, 4))
            self.transposed = nn.Parameter(self.whole.data.t())
            self.rows = nn.Parameter(self.whole.data[:2])
            self.tied = nn.Parameter(self.whole.data)

    net = Views()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    own_storages(net)
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    assert net.tied.data_ptr() == net.whole.data_ptr()
