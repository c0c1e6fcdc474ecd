"""Real weights through the real planner, cycle after cycle: not one bit changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from builders import (
    CPU,
    host_arena,
    rollout_request,
    run_config,
    same_bits,
    sample,
    sampling_params,
    scored,
    tiny_model,
    train_stack,
    weights,
)
from recording_roles import policy
from torch import Tensor, nn

from unirl.algorithms.making import make_algorithm
from unirl.core.components import FROZEN, NETWORK_BASE, Component, Movable, TensorComponent
from unirl.core.types import ScoredRollout
from unirl.distributed.ranks import OneRank
from unirl.memory.hostmem import HostArena
from unirl.memory.movers import RoleWeights, module_components
from unirl.memory.sharing import share_base
from unirl.models.tiny import TinyModel
from unirl.residency.directory import State
from unirl.residency.planner import ResidencyPlanner
from unirl.residency.policy import Role
from unirl.residency.transition import ComponentMove, Transition
from unirl.rollout.replica import ReplicaEngine
from unirl.train.backend import WholeBackend
from unirl.train.optimizer import moment_tensors
from unirl.train.stack import TrainStack

ALL = tuple(Role)
NUM_CYCLES = 20


class Slab:
    """A planner over real components, and what it moved."""

    def __init__(self, train: Sequence[Movable], rollout: Sequence[Movable]) -> None:
        self.records: list[Transition] = []
        reward = RoleWeights(module_components("reward", nn.Linear(3, 3)), host_arena())
        self.planner = ResidencyPlanner(
            policy(*ALL),
            {Role.TRAIN: train, Role.ROLLOUT: rollout, Role.REWARD: reward.parts},
            self.records.append,
            lambda: None,
        )

    def cycle(self) -> None:
        """A rollout, its scores, and the trainer back for the next step."""
        self.planner.enter(Role.ROLLOUT)
        self.planner.set(Role.ROLLOUT, on_device=False)
        self.planner.enter(Role.REWARD)
        self.planner.enter(Role.TRAIN)

    def moves_of(self, component: str) -> list[ComponentMove]:
        moves = (move for transition in self.records for move in transition.moves)
        return [move for move in moves if move.component == component]

    def bytes_out(self, component: str) -> int:
        """Copied from the device to the host."""
        leaving = [m for m in self.moves_of(component) if m.target is State.PARKED]
        return sum(move.moved.num_bytes for move in leaving)


class Network(nn.Module):
    """A frozen layer, two trained ones with one weight, and a buffer that each forward writes."""

    running_mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("running_mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(self.frozen(x)).tanh())
        self.running_mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.running_mean


class Trainer:
    """The network with AdamW, which counts its writes as the train stack does."""

    def __init__(self) -> None:
        self.network = Network()
        self.trained = [p for p in self.network.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=0.05)
        self.num_writes = 0
        self.parts = RoleWeights(self._components(), host_arena()).parts

    def _components(self) -> list[Component]:
        network, written = self.network, lambda: self.num_writes
        return [
            TensorComponent("train.base", network.frozen.parameters, lambda: FROZEN),
            TensorComponent("train.weights", lambda: self.trained, written),
            TensorComponent("train.moments", lambda: moment_tensors(self.optimizer), written),
            TensorComponent("train.buffers", lambda: list(network.buffers()), lambda: None),
        ]

    def step(self, number: int) -> float:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        loss = self.network(x).square().mean()
        loss.backward()
        self.num_writes += 1
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def tensors(self) -> Iterator[Tensor]:
        yield from self.network.state_dict().values()
        yield from moment_tensors(self.optimizer)

    def slab(self) -> Slab:
        return Slab(self.parts, ())


# --- twenty cycles --------------------------------------------------------------------------------


def test_twenty_cycles_of_parking_and_training_are_bitwise_training_alone():
    parked, resident = Trainer(), Trainer()
    slab = parked.slab()
    losses = []
    for number in range(NUM_CYCLES):
        slab.cycle()
        losses.append((parked.step(number), resident.step(number)))
        pairs = zip(parked.tensors(), resident.tensors(), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)
    assert all(left == right for left, right in losses)
    assert losses[0] != losses[-1], "it trains"


def test_parameters_ties_and_optimizer_keys_are_the_same_objects_after_twenty_cycles():
    trainer = Trainer()
    trainer.step(0)
    network, optimizer = trainer.network, trainer.optimizer
    before = dict(network.named_parameters(remove_duplicate=False))
    buffer, states = network.running_mean, {p: dict(s) for p, s in optimizer.state.items()}
    slab = trainer.slab()
    for _ in range(NUM_CYCLES):
        slab.cycle()
    after = dict(network.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert network.second.weight is network.first.weight
    assert network.running_mean is buffer
    assert list(optimizer.state) == list(states) == trainer.trained
    for parameter, state in states.items():
        assert all(optimizer.state[parameter][name] is value for name, value in state.items())


def test_a_cold_optimizer_is_cold_after_twenty_cycles():
    trainer = Trainer()
    slab = trainer.slab()
    for _ in range(NUM_CYCLES):
        slab.cycle()
    assert trainer.optimizer.state == {}


def test_while_it_is_parked_the_trainer_holds_no_byte_but_its_step_counters():
    trainer = Trainer()
    trainer.step(0)
    slab = trainer.slab()
    slab.planner.enter(Role.ROLLOUT)
    assert sum(t.untyped_storage().nbytes() for t in trainer.tensors()) == 0
    steps = [state["step"] for state in trainer.optimizer.state.values()]
    assert [step.item() for step in steps] == [1, 1, 1]
    assert all(parameter.grad is None for parameter in trainer.trained)


def test_in_twenty_cycles_the_base_crosses_once_and_the_rest_as_often_as_it_is_written():
    trainer = Trainer()
    slab = trainer.slab()
    for number in range(NUM_CYCLES):
        slab.cycle()
        slab.cycle()  # nothing was written since, so all but the buffers is just freed
        trainer.step(number)
    trained = sum(parameter.nbytes for parameter in trainer.trained)
    assert slab.bytes_out("train.base") == 6 * 6 * 4 + 6 * 4
    assert slab.bytes_out("train.weights") == NUM_CYCLES * trained
    assert slab.bytes_out("train.moments") == (NUM_CYCLES - 1) * 2 * trained
    assert slab.bytes_out("train.buffers") == 2 * NUM_CYCLES * trainer.network.running_mean.nbytes


# --- the train stack ------------------------------------------------------------------------------


def roll_out(model: TinyModel, window: int) -> ScoredRollout:
    return scored(sample(model, rollout_request(key=f"window-{window}"), forward_batch_size=4))


def stack_on(host: HostArena, model: TinyModel) -> TrainStack:
    """A train stack that is parked in this arena."""
    config = run_config()
    algorithm = make_algorithm(config.algorithm)
    return TrainStack(
        model,
        WholeBackend(),
        algorithm,
        config.stack,
        total_steps=10,
        sampling=sampling_params(),
        seed=config.seed,
        device=CPU,
        ranks=OneRank(),
        host=host,
    )


def engine_beside(stack: TrainStack, host: HostArena, *, shares_base: bool) -> ReplicaEngine:
    """An engine of the same weights, over the memory of the stack's base where it is shared."""
    model = tiny_model()
    if not shares_base:
        return ReplicaEngine(model, 4, CPU, host, None)
    share_base(model.network, stack.model.network)
    return ReplicaEngine(model, 4, CPU, host, base_of(stack))


def base_of(stack: TrainStack) -> Movable:
    return next(part for part in stack.parts if part.name == "train.base")


@pytest.mark.parametrize("lora_rank", [2, None])
def test_a_step_after_parking_gives_the_loss_of_one_without_bit_for_bit(lora_rank):
    metrics: list[list[dict[str, float]]] = []
    learned = []
    for parks in (False, True):
        model = tiny_model(lora_rank=lora_rank)
        stack = train_stack(model)
        slab = Slab(stack.parts, ())
        metrics.append([])
        for window in range(3):
            rollout = roll_out(model, window)
            if parks:
                slab.cycle()
            metrics[-1] += [dict(update.metrics) for update in stack.update([rollout])]
        learned.append(weights(model))
    assert metrics[0] == metrics[1]
    assert {"loss", "grad_norm"} <= metrics[0][0].keys()
    assert same_bits(*learned)


def test_networks_that_share_a_base_move_it_once_each_way():
    host, model = host_arena(), tiny_model()
    stack = stack_on(host, model)
    base = base_of(stack)
    engine = engine_beside(stack, host, shares_base=True)
    slab = Slab(stack.parts, engine.parts)
    before = weights(model)
    slab.planner.enter(Role.ROLLOUT)
    assert slab.moves_of("train.base") == [], "the engine needs it too"
    for _ in range(3):
        slab.cycle()
    assert same_bits(weights(model), before)
    assert slab.moves_of("rollout.base") == [], "there is no second one"
    targets = [move.target for move in slab.moves_of("train.base")]
    assert targets == [State.PARKED, State.RESIDENT] * 3, "away only while the reward works"
    assert slab.bytes_out("train.base") == base.num_bytes()
    assert host.copy_of(NETWORK_BASE).num_bytes == base.num_bytes()
    slab.planner.enter(Role.REWARD)
    sampled = engine._model.network.parameters()
    assert sum(parameter.untyped_storage().nbytes() for parameter in sampled) == 0


def test_networks_with_a_base_each_use_one_host_copy_and_none_crosses_back():
    host, model = host_arena(), tiny_model()
    stack = stack_on(host, model)
    slab = Slab(stack.parts, engine_beside(stack, host, shares_base=False).parts)
    before = weights(model)
    for _ in range(3):
        slab.cycle()
    assert same_bits(weights(model), before)
    size = base_of(stack).num_bytes()
    for name in ("train.base", "rollout.base"):
        assert slab.bytes_out(name) == 0, "the engine left it on the host when it was built"
        assert sum(move.moved.num_bytes for move in slab.moves_of(name)) == 3 * size
    assert host.copy_of(NETWORK_BASE).num_bytes == size


def test_networks_that_share_a_base_sample_what_two_bases_would():
    images = []
    for shares_base in (False, True):
        host = host_arena()
        stack = stack_on(host, tiny_model())
        engine = engine_beside(stack, host, shares_base=shares_base)
        slab = Slab(stack.parts, engine.parts)
        for _ in range(2):
            slab.cycle()
        slab.planner.enter(Role.ROLLOUT)
        images.append(engine.generate(rollout_request(weight_version=None)).images)
    assert torch.equal(*images)
