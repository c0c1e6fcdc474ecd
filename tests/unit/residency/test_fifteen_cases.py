"""The fifteen cases of public bug reports, R1 to R15, and for each a naive variant that fails it.

A case takes the implementation under test as `build`: the fixture gives the real one, and
`test_a_naive_variant_fails_the_case` passes others. What other files test in depth is here in
short, with its place named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from builders import (
    main_suite,
    offload,
    randomize_adapter,
    records,
    rollout_request,
    run_config,
    sample,
    scored,
    tiny_model,
    train_stack,
)
from fake_device import FakeDevice, FakeDeviceError
from naive_planner import (
    BelievesTheRole,
    BringsTheTrainerBack,
    BringsTheTrainerBackFirst,
    CopiesAlways,
    EvaluatesBesideTheTrainer,
    ForgetsUntrackedActive,
    ForgetsWhatWasLeft,
    HastyDevice,
    HidesTheFirstFailure,
    IgnoresPins,
    LeavesOneBehind,
    LeavesTheEngineAwake,
    Movers,
    MovesAlways,
    MovesTensorByTensor,
    NeverCopiesAgain,
    ParksBystanders,
    PullsInWhatItParks,
    PushesBeforeWaking,
    PushesBlindly,
    RestoresParametersOnly,
    SavesWhereverTheTrainerIs,
    SleepsBetweenChunks,
    TrainsBesideTheReward,
    WakesAllAgain,
    moments_and_counters,
    moments_made_by_looking,
    movers_of,
    parks_where_nothing_is_said,
    stack_that_keeps_gradients,
)
from slab import ALL, Checkpoints, Setup, Slab
from torch import Tensor, nn

from unirl.algorithms.making import make_algorithm
from unirl.config.schema import RunConfig
from unirl.core.components import FROZEN, Movable, Moved, Parking, TensorComponent
from unirl.core.errors import ResidencyError, UnirlError
from unirl.data.stream import PromptStream
from unirl.memory.copies import Device
from unirl.memory.hostmem import GIB, HostArena, HostLimit
from unirl.memory.movers import RoleWeights, module_components
from unirl.models.tiny import TinyModel
from unirl.planning.recording import NoArchive
from unirl.residency.directory import State
from unirl.residency.planner import ResidencyPlanner
from unirl.residency.policy import ResidencyPolicy, Role
from unirl.residency.transition import Transition
from unirl.tracking.tracker import Tracker
from unirl.train.optimizer import moment_tensors
from unirl.train.stack import TrainStack
from unirl.trainer.diffusion import DiffusionTrainer
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.phases import Phases
from unirl.trainer.progress import Progress
from unirl.trainer.requests import RequestFactory

TRAIN, ROLLOUT, REWARD = Role.TRAIN, Role.ROLLOUT, Role.REWARD
SIX = [
    "train offload",
    "rollout onload",
    "rollout offload",
    "reward onload",
    "reward offload",
    "train onload",
]
"""One rollout and one step with all roles parked."""


def real_movers(
    components: Sequence[TensorComponent], host: HostArena, device: Device
) -> Sequence[Movable]:
    return RoleWeights(components, host, device_of=lambda _: device).parts


@dataclass(frozen=True)
class Build:
    """An implementation: the real one, but for what is said."""

    planner: type[ResidencyPlanner] = ResidencyPlanner
    phases: type[Phases] = Phases
    trainer: type[DiffusionTrainer] = DiffusionTrainer
    evaluator: type[Evaluator] = Evaluator
    policy_of: Callable[[RunConfig], ResidencyPolicy] = ResidencyPolicy.of
    movers: Movers = real_movers
    device: type[FakeDevice] = FakeDevice
    moments: Callable[[torch.optim.Optimizer], list[Tensor]] = moment_tensors
    stack: Callable[[TinyModel], TrainStack] = train_stack

    def slab(self, **setup: Any) -> Slab:
        return Slab(Setup(**setup), self.planner, self.phases)

    def move(
        self, device: FakeDevice, *components: TensorComponent
    ) -> tuple[Sequence[Movable], HostArena]:
        host = HostArena(HostLimit(64 * GIB, "a test"), pin=False)
        return self.movers(components, host, device), host


@pytest.fixture
def build() -> Build:
    return Build()


class Loop:
    """The real loop and evaluation over a slab."""

    def __init__(
        self, build: Build, read_the_device: bool = True, save_interval: int = 99, **overrides: Any
    ) -> None:
        self.slab = build.slab()
        config = run_config(
            {
                "num_rollouts": 4,
                "eval_chunk_prompts": 1,
                "reward.scorers": {"bright": {"path": "jpeg_size"}},
                **overrides,
            }
        )
        requests = RequestFactory(config, tiny_model(), make_algorithm(config.algorithm))
        phases = self.slab.phases
        self.evaluator = build.evaluator(
            config, phases, requests, [main_suite(3)], NoArchive(), lambda: False
        )
        self.trainer = build.trainer(
            config,
            self.slab,
            phases,
            PromptStream(records(6), config.batch_size, config.seed),
            requests,
            self.evaluator,
            Checkpoints(self.slab, save_interval, read_the_device),
            Tracker([]),
            NoRecord(),
            lambda: False,
            Progress(config.num_devices),
        )

    def train(self) -> list[str]:
        self.trainer.train(0)
        return self.slab.events.seen


class NoRecord:
    """A `MoveRecord`: the slab has one of its own."""

    def at(self, rollout: int, during: str) -> None:
        return

    def record(self, transition: Transition) -> None:
        return

    def phase_ended(self, name: str, seconds: float) -> None:
        return

    def take_metrics(self) -> dict[str, float]:
        return {}


def warm(slab: Slab) -> Slab:
    """After one rollout and one step, with its events forgotten."""
    slab.rollout()
    slab.score()
    slab.step()
    slab.events.take()
    return slab


# --- R1: no redundant trip ------------------------------------------------------------------------


def test_r1_from_rollout_to_reward_the_parked_trainer_stays_where_it_is(build):
    slab = warm(build.slab())
    slab.rollout()
    slab.events.take()
    slab.score()
    assert slab.events.take() == ["reward onload", "score"]


def test_r1_a_step_a_read_and_two_saves_move_nothing(build):
    slab = warm(build.slab())
    moved = len(slab.memory.operations)
    slab.step()
    slab.phases._stage_adapter()
    slab.save_device()
    slab.save_device()
    assert slab.events.take() == ["step", "extract", "save", "save"]
    assert len(slab.memory.operations) == moved


def test_r1_with_all_roles_parked_a_rollout_is_a_cycle_of_six(build):
    slab = warm(build.slab())
    for _ in range(3):
        before = len(slab.records)
        slab.rollout(sync=True)
        slab.score()
        slab.step()
        assert slab.texts()[before:] == SIX


# --- R2: an untracked active role still displaces others ------------------------------------------


def test_r2_entering_an_untracked_trainer_parks_the_reward_and_moves_no_trainer(build):
    slab = build.slab(tracked=[ROLLOUT, REWARD])
    slab.planner.enter(TRAIN)
    assert slab.events.take() == ["reward offload"]
    moved = {operation.split()[1].split(".")[0] for operation in slab.memory.operations}
    assert moved == {"reward"}


# --- R3: a save after an evaluation that parked the trainer ---------------------------------------


def test_r3_a_save_that_is_due_brings_the_trainer_back_once_the_reward_left(build):
    loop = Loop(build, save_interval=2, eval_interval=1)
    events = loop.train()
    saves = [at for at, event in enumerate(events) if event == "save"]
    assert len(saves) == 2
    for at in saves:
        assert events[at - 2 : at] == ["reward offload", "train onload"]


def test_r3_a_save_that_is_not_due_costs_no_move(build):
    loop = Loop(build, save_interval=2, eval_interval=1)
    events = loop.train()
    assert events.count("train onload") == 4 + 2, "before each step, and for each of two saves"


def test_r3_a_save_that_reads_the_host_costs_no_move(build):
    loop = Loop(build, read_the_device=False, save_interval=1, eval_interval=1)
    events = loop.train()
    assert events.count("train onload") == 4
    assert events.count("save") == 4


# --- R4: a push of an adapter needs a live base ---------------------------------------------------


def test_r4_a_push_onto_a_base_that_was_lost_is_refused_and_writes_nothing(build):
    slab = build.slab(forgets_base=True, parked=[ROLLOUT])
    with pytest.raises(ResidencyError, match=r"rollout.base is VOID on the device.*only reload"):
        slab.rollout(sync=True)
    assert slab.all_parts["rollout.adapter"].num_writes == 0
    assert not slab.planner.is_on_device(ROLLOUT), "the engine sleeps again"


def test_r4_a_base_that_is_live_gets_the_adapter_only(build):
    """That nothing but the adapter is written: test_engines.py, that it works: test_sync.py."""
    slab = warm(build.slab())
    slab.memory.operations.clear()
    slab.rollout(sync=True)
    into_host = [o for o in slab.memory.operations if o.startswith("copy rollout")]
    assert into_host == ["copy rollout.adapter"], "pushed, so newer than its host copy"
    assert slab.memory.copied_out["network"] == 0


def test_r4_the_first_rollout_gets_base_and_adapter(build):
    slab = build.slab()
    slab.rollout()
    brought = [o for o in slab.memory.operations if o.startswith("in ")]
    assert brought == ["in rollout.base", "in rollout.adapter", "in rollout.graphs"]
    assert "generate" in slab.events.seen


# --- R5: wake, push, generate, in this order ------------------------------------------------------


def test_r5_a_sleeping_engine_is_not_touched_by_a_push(build):
    slab = warm(build.slab())
    with pytest.raises(ResidencyError, match=r"rollout.base is parked.*rollout.adapter is parked"):
        slab.phases._load_weights()
    assert slab.all_parts["rollout.adapter"].num_writes == 0
    assert slab.sync.published_version is None


def test_r5_the_engine_wakes_before_it_is_loaded_and_is_loaded_before_it_samples(build):
    """Memory that only sampling needs (caches, graphs) would be a component that comes after."""
    slab = warm(build.slab())
    slab.rollout(sync=True)
    order = ["extract", "train offload", "rollout onload", "push 1", "generate", "rollout offload"]
    assert slab.events.take() == order


def test_r5_an_engine_that_lost_its_adapter_does_not_sample(build):
    slab = build.slab(forgets=True)
    slab.rollout(sync=True)
    slab.events.take()
    with pytest.raises(ResidencyError, match=r"rollout.adapter is VOID .*; only push fills it"):
        slab.rollout(sync=False)
    assert "generate" not in slab.events.seen
    slab.rollout(sync=True)


# --- R6: a partial and a repeated wake ------------------------------------------------------------


def test_r6_a_role_that_is_there_in_part_does_not_work_and_the_rest_is_named(build):
    """A name that does not exist cannot be asked for: roles are an enum."""
    slab = build.slab(shares_base=True)
    with pytest.raises(ResidencyError) as caught:
        slab.planner.require_live(ROLLOUT)
    assert "rollout.adapter is parked" in str(caught.value)
    assert "rollout.graphs is dropped" in str(caught.value)
    assert "train.base" not in str(caught.value), "the trainer's, which the engine uses, is there"


def test_r6_only_what_is_missing_is_brought_and_a_second_wake_is_no_transition(build):
    slab = build.slab(shares_base=True)
    for _ in range(2):
        slab.planner.set(ROLLOUT, on_device=True)
    assert slab.memory.operations == ["in rollout.adapter", "in rollout.graphs"]
    assert slab.events.take() == ["rollout onload"]


# --- R7: what is parked is what is restored -------------------------------------------------------


def test_r7_whatever_is_parked_has_a_way_back_and_takes_it(build):
    slab = warm(build.slab(parked=ALL))
    slab.rollout()
    states = slab.planner.snapshot()
    for part in slab.parts[TRAIN]:
        assert {State.PARKED, State.DROPPED, State.RESIDENT} >= {states[part.name]}
        if states[part.name] is State.PARKED:
            assert slab.memory.host[part.host_key] == part.newest
        else:
            assert part.is_scratch or part.parking is Parking.KEEP
    slab.planner.enter(TRAIN)
    slab.require_work(TRAIN)


def test_r7_parameters_and_buffers_come_back(build):
    torch.manual_seed(0)
    network = nn.BatchNorm1d(4)
    network.running_mean.uniform_()  # type: ignore[union-attr]
    before = {name: value.clone() for name, value in network.state_dict().items()}
    parts, _ = build.move(FakeDevice(), *module_components("network", network))
    for part in parts:
        part.park(copy=True)
    for part in parts:
        part.unpark()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_r7_tensors_without_a_host_copy_cannot_be_declared_to_come_back(build):
    lost = TensorComponent("base", list, lambda: FROZEN, parking=Parking.REBUILD)
    with pytest.raises(ResidencyError, match="base: tensors cannot be rebuilt"):
        build.move(FakeDevice(), lost)


# --- R8: a failure inside a phase -----------------------------------------------------------------


def test_r8_after_a_failed_generation_the_engine_leaves_before_the_trainer_comes(build):
    """Other failures in phases: test_phases.py; anything else: test_residency_machine.py."""
    slab = warm(build.slab())
    slab.events.failing["generate"] = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        slab.rollout(sync=True)
    slab.events.failing.clear()
    assert not slab.planner.is_on_device(ROLLOUT)
    slab.events.take()
    slab.step()
    assert slab.events.take() == ["train onload", "step"]


def test_r8_the_first_failure_surfaces_with_the_second_as_a_note(build):
    slab = warm(build.slab())
    slab.planner.enter(ROLLOUT)
    slab.events.failing["generate"] = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory") as caught, slab.faults(0):
        slab.rollout()
    assert caught.value.__notes__ == ["putting the rollout engine to sleep failed too: stuck"]
    slab.events.failing.clear()
    slab.rollout()


def test_r8_a_base_left_for_a_trainer_who_failed_to_come_leaves_with_the_next_phase(build):
    slab = build.slab(shares_base=True)
    slab.planner.enter(ROLLOUT)
    with pytest.raises(OSError, match="stuck"), slab.faults(2):
        slab.step()  # two of the engine's own components leave, then the adapter fails to come
    base = slab.all_parts["train.base"]
    assert base.is_resident, "left where the trainer needs it"
    slab.planner.enter(REWARD)
    assert not base.is_resident
    slab.step()


# --- R9: only what was parked is restored ---------------------------------------------------------


def test_r9_what_starts_off_the_device_is_not_pulled_in_by_leaving_a_phase(build):
    slab = build.slab()
    slab.planner.enter(REWARD)
    slab.planner.enter(TRAIN)
    slab.planner.set(ROLLOUT, on_device=False)
    moved = {operation.split()[1].split(".")[0] for operation in slab.memory.operations}
    assert "rollout" not in moved


# --- R10: an evaluation takes the same road -------------------------------------------------------


def test_r10_an_evaluation_without_a_sync_parks_the_trainer(build):
    loop = Loop(build)
    loop.evaluator.run(0, sync_weights=False)
    assert loop.slab.texts()[:3] == ["train offload", "reward offload", "rollout onload"]


def test_r10_without_a_sync_the_engine_is_awake_through_all_chunks(build):
    loop = Loop(build)
    loop.evaluator.run(0, sync_weights=False)
    texts = loop.slab.texts()
    assert loop.slab.events.seen.count("generate") == 3
    assert [text for text in texts if text.startswith("rollout")] == [
        "rollout onload",
        "rollout offload",
    ]
    assert texts[-1] == "rollout offload"


# --- R11: the optimizer's small state -------------------------------------------------------------


class Warm:
    """Two parameters and their optimizer, as a component; one of them has never had a gradient."""

    def __init__(self, build: Build, num_stepped: int) -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(3)) for _ in range(2)]
        self.optimizer = torch.optim.AdamW(self.parameters)
        for parameter in self.parameters[:num_stepped]:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        moments = TensorComponent("moments", lambda: build.moments(self.optimizer), lambda: 0)
        weights = TensorComponent("weights", lambda: self.parameters, lambda: 0)
        self.parts, _ = build.move(FakeDevice(), weights, moments)

    def park(self) -> None:
        for part in self.parts:
            part.park(copy=True)

    def unpark(self) -> None:
        for part in self.parts:
            part.unpark()


def test_r11_a_cold_optimizer_stays_cold(build):
    """In depth, over cycles: test_cycles.py."""
    cold = Warm(build, num_stepped=0)
    cold.park()
    cold.unpark()
    assert cold.optimizer.state == {}


def test_r11_step_counters_stay_and_keys_of_a_partly_warm_optimizer_do_not_change(build):
    partly = Warm(build, num_stepped=1)
    first = partly.parameters[0]
    before = dict(partly.optimizer.state[first])
    partly.park()
    # Numbers, since a tensor that is emptied must not be printed.
    num_keys, counter_bytes = len(partly.optimizer.state), before["step"].untyped_storage().nbytes()
    partly.unpark()
    assert (num_keys, counter_bytes) == (1, 4), "the counter never left"
    assert partly.optimizer.state[first].keys() == before.keys()
    assert all(partly.optimizer.state[first][name] is value for name, value in before.items())


# --- R12: gradients and second references ---------------------------------------------------------


def test_r12_after_a_step_there_are_no_gradients_to_park(build):
    model = tiny_model()
    randomize_adapter(model)
    stack = build.stack(model)
    stack.update([scored(sample(model, rollout_request(), forward_batch_size=4))])
    trained = [p for p in model.network.parameters() if p.requires_grad]
    assert all(parameter.grad is None for parameter in trained)
    declared = [*model.network.parameters(), *model.network.buffers()]
    moments = 2 * sum(parameter.nbytes for parameter in trained)
    assert offload(stack).touched_bytes == sum(t.nbytes for t in declared) + moments


def test_r12_a_second_reference_keeps_no_device_memory(build):
    """One to memory that was replaced is named: test_moves_on_a_device.py."""
    device = FakeDevice()
    tensor = device.put("moments", torch.ones(6))
    planted = tensor.detach()
    (part,), _ = build.move(device, TensorComponent("moments", lambda: [tensor], lambda: 0))
    part.park(copy=True)
    device.require_used(0)
    assert planted.shape == (6,)


# --- R13: tied and aliased storages ---------------------------------------------------------------


def test_r13_one_storage_is_counted_and_moved_once_and_stays_tied(build):
    device = FakeDevice()
    first = device.put("weight", torch.arange(6.0))
    tied, view = first.detach(), first.view(2, 3)[1]
    component = TensorComponent("tied", lambda: [first, tied, view], lambda: 0)
    (part,), _ = build.move(device, component)
    assert part.num_bytes() == 24
    for cycle in range(3):
        assert part.park(copy=cycle == 0).touched_bytes == 24
        assert part.unpark() == Moved(24)
    first[4] = 40
    assert tied[4] == view[1] == 40
    assert first.tolist() == [0, 1, 2, 3, 40, 5]


def test_r13_two_components_with_one_storage_are_refused(build):
    tensor = torch.ones(4)
    pair = [TensorComponent(n, lambda: [tensor], lambda: 0) for n in ("train.a", "train.b")]
    parts, _ = build.move(FakeDevice(), *pair)
    with pytest.raises(ResidencyError, match=r"train.b and train.a hold the same memory \(16 byte"):
        parts[0].park(copy=True)


# --- R14: copies that take a while ----------------------------------------------------------------


def test_r14_host_bytes_are_read_and_device_memory_freed_only_after_the_copy(build):
    """What the fake device refuses: test_fake_device.py."""
    device = build.device()
    tensor = device.put("weight", torch.arange(6.0))
    (part,), host = build.move(device, TensorComponent("part", lambda: [tensor], lambda: 0))
    part.park(copy=True)
    device.require_idle()
    held = host.copy_of("part").spans[0].view(torch.float32)
    assert held.tolist() == [0, 1, 2, 3, 4, 5]
    part.unpark()
    device.require_idle()
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]


# --- R15: the policy holds on every path ----------------------------------------------------------

PATHS: dict[str, tuple[Callable[[Slab], object], Role | None]] = {
    "rollout": (lambda slab: slab.rollout(), None),
    "rollout with a sync": (lambda slab: slab.rollout(sync=True), None),
    "sync alone": (lambda slab: slab.push_only(), None),
    "reward": (lambda slab: slab.score(), REWARD),
    "step": (lambda slab: slab.step(), TRAIN),
    "save": (lambda slab: slab.save_device(), TRAIN),
    "evaluation": (lambda slab: slab.evaluate(2, sync=True), REWARD),
    "evaluation without a sync": (lambda slab: slab.evaluate(2, sync=False), REWARD),
}
"""Each with the role that is left on the device although it is parked while idle."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "parked",
    [
        (),
        (TRAIN,),
        (ROLLOUT,),
        (REWARD,),
        (TRAIN, ROLLOUT),
        (TRAIN, REWARD),
        (ROLLOUT, REWARD),
        ALL,
    ],
    ids=lambda parked: "+".join(role.value for role in parked) or "none",
)
def test_r15_after_every_path_idle_roles_are_where_the_policy_says(path, parked, build):
    slab = warm(build.slab(parked=parked))
    walk, last = PATHS[path]
    walk(slab)
    for role in ALL:
        stays = role not in parked or role is last
        assert slab.planner.is_on_device(role) == slab.is_whole(role) == stays, role


def test_r15_a_key_that_is_not_set_means_what_is_documented_and_the_plan_says_it(build):
    policy = build.policy_of(run_config())
    assert policy.text == "train stays, rollout parks, reward stays"
    slab = build.slab()
    plan = "train parks, rollout parks, reward parks; moved: train, rollout, reward"
    assert slab.planner.plan == plan


# --- naive variants -------------------------------------------------------------------------------

Case = Callable[..., None]

NAIVE: Sequence[tuple[Case, Build]] = (
    (
        test_r1_from_rollout_to_reward_the_parked_trainer_stays_where_it_is,
        Build(planner=MovesAlways),
    ),
    (test_r1_a_step_a_read_and_two_saves_move_nothing, Build(planner=MovesAlways)),
    (test_r1_with_all_roles_parked_a_rollout_is_a_cycle_of_six, Build(planner=MovesAlways)),
    (
        test_r1_with_all_roles_parked_a_rollout_is_a_cycle_of_six,
        Build(planner=BringsTheTrainerBack),
    ),
    (
        test_r2_entering_an_untracked_trainer_parks_the_reward_and_moves_no_trainer,
        Build(planner=ForgetsUntrackedActive),
    ),
    (
        test_r2_entering_an_untracked_trainer_parks_the_reward_and_moves_no_trainer,
        Build(planner=ParksBystanders),
    ),
    (
        test_r3_a_save_that_is_due_brings_the_trainer_back_once_the_reward_left,
        Build(trainer=SavesWhereverTheTrainerIs),
    ),
    (
        test_r3_a_save_that_is_due_brings_the_trainer_back_once_the_reward_left,
        Build(planner=TrainsBesideTheReward),
    ),
    (test_r3_a_save_that_is_not_due_costs_no_move, Build(trainer=BringsTheTrainerBackFirst)),
    (test_r3_a_save_that_reads_the_host_costs_no_move, Build(trainer=BringsTheTrainerBackFirst)),
    (test_r3_a_save_that_reads_the_host_costs_no_move, Build(planner=NeverCopiesAgain)),
    (
        test_r4_a_push_onto_a_base_that_was_lost_is_refused_and_writes_nothing,
        Build(phases=PushesBlindly),
    ),
    (test_r4_a_base_that_is_live_gets_the_adapter_only, Build(planner=CopiesAlways)),
    (test_r4_the_first_rollout_gets_base_and_adapter, Build(planner=LeavesOneBehind)),
    (test_r5_a_sleeping_engine_is_not_touched_by_a_push, Build(phases=PushesBlindly)),
    (
        test_r5_the_engine_wakes_before_it_is_loaded_and_is_loaded_before_it_samples,
        Build(phases=PushesBeforeWaking),
    ),
    (test_r5_an_engine_that_lost_its_adapter_does_not_sample, Build(planner=BelievesTheRole)),
    (
        test_r6_a_role_that_is_there_in_part_does_not_work_and_the_rest_is_named,
        Build(planner=BelievesTheRole),
    ),
    (
        test_r6_only_what_is_missing_is_brought_and_a_second_wake_is_no_transition,
        Build(planner=WakesAllAgain),
    ),
    (
        test_r6_only_what_is_missing_is_brought_and_a_second_wake_is_no_transition,
        Build(planner=MovesAlways),
    ),
    (test_r7_whatever_is_parked_has_a_way_back_and_takes_it, Build(planner=LeavesOneBehind)),
    (test_r7_whatever_is_parked_has_a_way_back_and_takes_it, Build(planner=NeverCopiesAgain)),
    (
        test_r7_parameters_and_buffers_come_back,
        Build(movers=movers_of(RestoresParametersOnly)),
    ),
    (
        test_r8_after_a_failed_generation_the_engine_leaves_before_the_trainer_comes,
        Build(phases=LeavesTheEngineAwake),
    ),
    (
        test_r8_the_first_failure_surfaces_with_the_second_as_a_note,
        Build(phases=HidesTheFirstFailure),
    ),
    (
        test_r8_a_base_left_for_a_trainer_who_failed_to_come_leaves_with_the_next_phase,
        Build(planner=ForgetsWhatWasLeft),
    ),
    (
        test_r9_what_starts_off_the_device_is_not_pulled_in_by_leaving_a_phase,
        Build(planner=PullsInWhatItParks),
    ),
    (
        test_r10_an_evaluation_without_a_sync_parks_the_trainer,
        Build(evaluator=EvaluatesBesideTheTrainer),
    ),
    (
        test_r10_without_a_sync_the_engine_is_awake_through_all_chunks,
        Build(evaluator=SleepsBetweenChunks),
    ),
    (test_r11_a_cold_optimizer_stays_cold, Build(moments=moments_made_by_looking)),
    (
        test_r11_step_counters_stay_and_keys_of_a_partly_warm_optimizer_do_not_change,
        Build(moments=moments_and_counters),
    ),
    (
        test_r11_step_counters_stay_and_keys_of_a_partly_warm_optimizer_do_not_change,
        Build(moments=moments_made_by_looking),
    ),
    (
        test_r12_after_a_step_there_are_no_gradients_to_park,
        Build(stack=stack_that_keeps_gradients),
    ),
    (
        test_r12_a_second_reference_keeps_no_device_memory,
        Build(movers=movers_of(MovesTensorByTensor)),
    ),
    (
        test_r13_one_storage_is_counted_and_moved_once_and_stays_tied,
        Build(movers=movers_of(MovesTensorByTensor)),
    ),
    (
        test_r13_two_components_with_one_storage_are_refused,
        Build(movers=movers_of(MovesTensorByTensor)),
    ),
    (
        test_r14_host_bytes_are_read_and_device_memory_freed_only_after_the_copy,
        Build(device=HastyDevice),
    ),
    (
        test_r15_a_key_that_is_not_set_means_what_is_documented_and_the_plan_says_it,
        Build(policy_of=parks_where_nothing_is_said),
    ),
)
NOT_CAUGHT = pytest.fail.Exception
"""What `pytest.raises` raises when nothing was raised."""


@pytest.mark.parametrize(
    ("case", "naive"), NAIVE, ids=[case.__name__.removeprefix("test_") for case, _ in NAIVE]
)
def test_a_naive_variant_fails_the_case(case, naive):
    with pytest.raises((AssertionError, UnirlError, FakeDeviceError, OSError, NOT_CAUGHT)):
        case(build=naive)


@pytest.mark.parametrize("path", PATHS)
def test_a_naive_planner_fails_each_line_of_the_table(path):
    case = test_r15_after_every_path_idle_roles_are_where_the_policy_says
    with pytest.raises(AssertionError):
        case(path, parked=(), build=Build(planner=IgnoresPins))


def test_every_case_has_a_naive_variant():
    cases = {case.__name__.split("_")[1] for case, _ in NAIVE}
    assert cases == {f"r{number}" for number in range(1, 16)}
