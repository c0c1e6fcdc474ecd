"""Parking and restoring weights: nothing changes but where the bytes are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unirl.core.components import FROZEN, Moved, RebuiltComponent, TensorComponent
from unirl.core.errors import ResidencyError
from unirl.memory.movers import ComponentMover, module_components, own_storages
from unirl.train.optimizer import moment_tensors

FLOAT = 4


class Counter:
    """A version that tests turn forward."""

    def __init__(self) -> None:
        self.value = 0

    def __call__(self) -> int:
        return self.value


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
    mover = ComponentMover(module_components("net", net))
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
    mover = ComponentMover([component([tensor])])
    mover.offload()
    mover.onload()
    assert tensor.view(torch.int32).tolist() == bits.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_every_dtype_is_moved(dtype):
    tensor = (random(33) * 3).to(dtype)
    expected = tensor.clone()
    mover = ComponentMover([component([tensor])])
    assert mover.offload() == Moved(33 * tensor.element_size())
    mover.onload()
    assert torch.equal(tensor, expected)


def test_tied_weights_and_views_of_one_storage_are_moved_once():
    base = random(10, 10)
    tensors = [base, base[2:4], base.t(), base.detach()]
    expected = [tensor.clone() for tensor in tensors]
    mover = ComponentMover([component(tensors)])
    assert mover.offload().num_bytes == 100 * FLOAT
    assert mover.onload().num_bytes == 100 * FLOAT
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    base[2, 0] = 7
    assert tensors[1][0, 0] == tensors[2][0, 2] == tensors[3][2, 0] == 7


def test_buffers_are_copied_each_time_since_a_forward_may_write_them():
    net = TiedNet()
    mover = ComponentMover(module_components("net", net))
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
    mover = ComponentMover(module_components("net", net))
    mover.offload()
    assert torch.equal(gradient, expected)
    mover.onload()
    assert net.first.weight.grad is gradient


def test_both_directions_are_idempotent():
    tensor = random(5)
    mover = ComponentMover([component([tensor])])
    assert mover.onload() == Moved(0)
    mover.offload()
    assert mover.offload() == Moved(0)
    mover.onload()
    assert mover.onload() == Moved(0)


def test_a_role_without_weights_moves_nothing():
    mover = ComponentMover([])
    assert (mover.offload(), mover.onload()) == (Moved(0), Moved(0))


def test_empty_tensors_are_allowed():
    tensor = torch.empty(0, 4)
    mover = ComponentMover([component([tensor])])
    assert mover.offload() == Moved(0)
    mover.onload()
    assert tensor.shape == (0, 4)


# --- what is copied -------------------------------------------------------------------------------


def test_frozen_weights_are_copied_to_the_host_once_and_dropped_afterwards():
    tensor = random(25)
    mover = ComponentMover([component([tensor])])
    assert mover.offload() == Moved(100, 0)
    mover.onload()
    for _ in range(2):
        assert mover.offload() == Moved(0, 100)
        assert mover.onload() == Moved(100)


def test_written_weights_are_copied_again_and_unwritten_ones_are_not():
    tensor, version = random(25), Counter()
    mover = ComponentMover([component([tensor], version)])
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
    mover = ComponentMover([component(tensors)])
    mover.offload()
    mover.onload()
    tensors.append(random(7, seed=1))
    expected = tensors[1].clone()
    assert mover.offload() == Moved(28, 20)
    mover.onload()
    assert torch.equal(tensors[1], expected)


# --- the optimizer --------------------------------------------------------------------------------


def optimizer_mover(net: nn.Module) -> tuple[torch.optim.AdamW, ComponentMover, Counter]:
    optimizer, version = torch.optim.AdamW(net.parameters()), Counter()
    moments = TensorComponent("moments", lambda: moment_tensors(optimizer), version)
    trained = TensorComponent("trained", lambda: list(net.parameters()), version)
    return optimizer, ComponentMover([trained, moments]), version


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


# --- parked weights -------------------------------------------------------------------------------


def test_a_parked_network_raises_instead_of_giving_junk():
    net = TiedNet()
    x = random(2, 6)
    mover = ComponentMover(module_components("net", net))
    mover.offload()
    with pytest.raises(RuntimeError):
        net(x)
    mover.onload()
    assert net(x).isfinite().all()


def test_a_forgotten_reference_keeps_no_memory():
    tensor = random(1000)
    alias, view = tensor.detach(), tensor[:10]
    mover = ComponentMover([component([tensor])])
    mover.offload()
    assert alias.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0


# --- failures -------------------------------------------------------------------------------------


@pytest.fixture
def moved_pair() -> tuple[Tensor, Tensor]:
    return random(5), random(6, seed=1)


def test_a_component_that_fails_to_park_leaves_all_on_the_device(moved_pair):
    first, second = moved_pair
    expected = first.clone()
    fails = True

    def tensors() -> list[Tensor]:
        if fails:
            raise OSError("gone")
        return [second]

    later = TensorComponent("second", tensors, lambda: FROZEN)
    mover = ComponentMover([component([first], name="first"), later])
    with pytest.raises(OSError, match="gone"):
        mover.offload()
    assert torch.equal(first, expected)
    fails = False
    mover.offload()
    mover.onload()
    assert torch.equal(first, expected)


def test_a_rebuilt_part_that_fails_to_drop_leaves_all_on_the_device(moved_pair):
    first, _ = moved_pair
    expected = first.clone()
    drops = [failing, lambda: 7]
    part = RebuiltComponent("session", lambda: drops.pop(0)(), lambda: 7)
    mover = ComponentMover([component([first]), part])
    with pytest.raises(OSError, match="no memory"):
        mover.offload()
    assert torch.equal(first, expected)
    assert mover.offload() == Moved(0, 20 + 7)
    mover.onload()
    assert torch.equal(first, expected)


def test_a_part_dropped_before_a_failure_is_built_again():
    alive = True

    def drop() -> int:
        nonlocal alive
        alive = False
        return 1

    def rebuild() -> int:
        nonlocal alive
        alive = True
        return 1

    mover = ComponentMover(
        [RebuiltComponent("good", drop, rebuild), RebuiltComponent("bad", failing, lambda: 1)]
    )
    with pytest.raises(OSError, match="no memory"):
        mover.offload()
    assert alive


def test_a_rebuild_that_fails_can_be_tried_again(moved_pair):
    first, _ = moved_pair
    expected = first.clone()
    rebuilds = [failing, lambda: 7]
    part = RebuiltComponent("session", lambda: 7, lambda: rebuilds.pop(0)())
    mover = ComponentMover([component([first]), part])
    mover.offload()
    with pytest.raises(OSError, match="no memory"):
        mover.onload()
    assert first.untyped_storage().nbytes() == 0, "a failed onload must leave all parked"
    mover.onload()
    assert torch.equal(first, expected)


def test_a_version_that_cannot_be_read_leaves_all_on_the_device(moved_pair):
    first, second = moved_pair
    expected = first.clone()
    mover = ComponentMover([component([first], name="a"), component([second], failing, "b")])
    with pytest.raises(OSError, match="no memory"):
        mover.offload()
    assert torch.equal(first, expected)


def test_two_components_with_one_storage_are_refused_and_nothing_is_parked():
    tensor = random(4, 4)
    expected = tensor.clone()
    mover = ComponentMover([component([tensor], name="one"), component([tensor.t()], name="two")])
    with pytest.raises(ResidencyError, match="two and one hold the same memory"):
        mover.offload()
    assert torch.equal(tensor, expected)


def test_two_components_of_one_name_are_both_parked_and_both_come_back(moved_pair):
    """Two scorers of one class declare the same names."""
    expected = [tensor.clone() for tensor in moved_pair]
    mover = ComponentMover([component([tensor], name="same") for tensor in moved_pair])
    for _ in range(2):
        mover.offload()
        mover.onload()
    assert all(torch.equal(a, b) for a, b in zip(moved_pair, expected, strict=True))


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
    mover = ComponentMover(module_components("net", net))
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
        ComponentMover([component([tensor])]).offload()
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
