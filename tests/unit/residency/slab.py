"""A slab of one device on which weights are numbers, so that lost or stale contents are noticed.

Planner, phases and LoRA sync are the real ones. The roles around them hold `HeldPart`s, and each
checks, when it works, that all it needs is on the device with its newest contents. Every move is an
operation that a test can let fail.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from builders import rollout_request
from recording_phases import Events
from recording_roles import policy
from torch import Tensor

from unirl.core.capabilities import EngineCapabilities
from unirl.core.components import VOID, Movable, Moved, Parking, StartedMove, Version, Void
from unirl.core.errors import WeightSyncError
from unirl.core.types import (
    Conditioning,
    Rewards,
    Rollout,
    RolloutRequest,
    ScoredRollout,
    Trajectory,
    UpdateStats,
)
from unirl.distributed.ranks import OneRank
from unirl.residency.planner import INITIALLY_ON_DEVICE, ResidencyPlanner
from unirl.residency.policy import Role
from unirl.residency.transition import Transition
from unirl.rollout.engine import SyncedEngine
from unirl.trainer.clock import NoMeter, PhaseClock
from unirl.trainer.phases import Phases
from unirl.trainer.roles import AroundStep
from unirl.weight_sync.lora import LocalLoraSync
from unirl.weight_sync.payload import LoadReport, Probe, WeightPayload

ALL = tuple(Role)
LOST = -1
"""What a device holds where contents were dropped."""
REQUEST = rollout_request(num_prompts=1, samples_per_prompt=2, weight_version=None)


@dataclass
class Memory:
    """Both memories of the slab, and the faults that moves meet."""

    host: dict[str, int] = field(default_factory=dict)
    """Contents of host copies by host key."""
    host_sizes: dict[str, int] = field(default_factory=dict)
    used_bytes: int = 0
    peak_bytes: int = 0
    copied_out: Counter[str] = field(default_factory=Counter)
    """Bytes that crossed to the host, by host key."""
    faults: set[int] = field(default_factory=set)
    """Which of the coming operations raise: 0 is the next one."""
    error: BaseException = field(default_factory=lambda: OSError("stuck"))
    fails_after_the_copy: bool = False
    """A park that fails has written the host copy already."""
    faults_at_start: set[int] = field(default_factory=set)
    """Which of the coming moves cannot even start: 0 is the next one."""
    written: set[str] = field(default_factory=set)
    """Host keys that are being written."""
    leaving: set[str] = field(default_factory=set)
    """Parts whose moves off the device have started."""
    coming: set[str] = field(default_factory=set)
    peak_of_both: int = 0
    """The most that was used while some left and others came."""
    operations: list[str] = field(default_factory=list)
    """Finished moves: `copy`, `drop` or `in`, and the part's name."""
    on_operation: Callable[[str], None] = lambda operation: None

    def is_fault(self) -> bool:
        """Counts one operation."""
        strikes = 0 in self.faults
        self.faults = {number - 1 for number in self.faults if number > 0}
        return strikes

    def start(self) -> None:
        """Counts one move that starts."""
        strikes = 0 in self.faults_at_start
        self.faults_at_start = {number - 1 for number in self.faults_at_start if number > 0}
        if strikes:
            raise self.error

    def take_room(self, num_bytes: int) -> None:
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def done(self, operation: str) -> None:
        self.operations.append(operation)
        self.on_operation(operation)


class HeldPart:
    """A component whose contents are one number."""

    def __init__(
        self,
        memory: Memory,
        name: str,
        size: int = 10,
        *,
        contents: int = 0,
        is_resident: bool = True,
        parking: Parking = Parking.COPY,
        written_by: str = "nobody",
        host_key: str = "",
        is_version_known: bool = True,
    ) -> None:
        self.name = name
        self.size = size
        self.parking = parking
        self.written_by = written_by
        self.on_demand = False
        self.host_key = host_key or name
        self.is_resident = is_resident
        self.contents = contents if is_resident else LOST
        self.newest = contents
        """What was written last."""
        self.num_writes = 0
        self._memory = memory
        self._is_version_known = is_version_known
        if is_resident:
            memory.take_room(size)
        elif parking is Parking.COPY:
            memory.host[self.host_key] = contents
            memory.host_sizes[self.host_key] = size

    def write(self, contents: int) -> None:
        assert self.is_resident, f"{self.name} was written while it was away"
        self.contents = self.newest = contents
        self.num_writes += 1

    def grow(self, num_bytes: int) -> None:
        self._memory.take_room(num_bytes)
        self.size += num_bytes

    @property
    def is_scratch(self) -> bool:
        """Whether it works without contents."""
        return self.parking is Parking.DROP and self.written_by == "nobody"

    @property
    def is_frozen(self) -> bool:
        return self.parking is Parking.COPY and self.written_by == "nobody"

    def read(self) -> int:
        """From the device, or from the host copy where it is parked."""
        return self.contents if self.is_resident else self._memory.host[self.host_key]

    def version(self) -> Version | Void:
        if self.is_resident and self.contents == LOST:
            return VOID
        return Version(self.num_writes if self._is_version_known else None)

    def num_bytes(self) -> int:
        return self.size

    def host_bytes(self) -> int:
        is_copied = self.parking is Parking.COPY and self.host_key in self._memory.host
        return self._memory.host_sizes[self.host_key] if is_copied else 0

    def park(self, *, copy: bool) -> Moved:
        memory, fails = self._memory, self._memory.is_fault()
        if not fails or memory.fails_after_the_copy:
            self._copy_out(copy)
        if fails:
            raise memory.error
        if copy:
            memory.copied_out[self.host_key] += self.size
        memory.used_bytes -= self.size
        self.is_resident, self.contents = False, LOST
        memory.done(f"{'copy' if copy else 'drop'} {self.name}")
        return Moved(self.size) if copy else Moved(0, self.size)

    def start_park(self, *, copy: bool) -> StartedMove:
        """Its memory is given up at the end, when nothing is on its way any more."""
        memory = self._memory
        memory.start()
        memory.leaving.add(self.name)
        memory.written |= {self.host_key} if copy else set()

        def wait() -> None:
            if copy and self.host_key in memory.written:
                self._copy_out(copy)
                memory.written.discard(self.host_key)

        def give_up() -> None:
            wait()
            memory.leaving.discard(self.name)

        def finish() -> Moved:
            wait()
            on_their_way = memory.written | memory.coming
            assert not on_their_way, f"{self.name} was freed before {on_their_way} were there"
            try:
                return self.park(copy=copy)
            finally:
                memory.leaving.discard(self.name)

        return StartedMove(wait, finish, give_up)

    def start_unpark(self) -> StartedMove:
        """Its memory is taken at once."""
        memory = self._memory
        memory.start()
        reads = self.parking is Parking.COPY
        assert not (reads and self.host_key in memory.written), f"{self.host_key} is being written"
        memory.take_room(self.size)
        memory.coming.add(self.name)
        if memory.leaving:
            memory.peak_of_both = max(memory.peak_of_both, memory.used_bytes)

        def give_up() -> None:
            memory.coming.discard(self.name)
            memory.used_bytes -= self.size

        def finish() -> Moved:
            give_up()
            return self.unpark()  # takes it again, unless it fails

        return StartedMove(lambda: None, finish, give_up)

    def _copy_out(self, copy: bool) -> None:
        assert self.is_resident, f"I5: {self.name} was parked twice"
        if copy:
            assert self.parking is Parking.COPY, f"{self.name} has no host copy"
            self._memory.host[self.host_key] = self.contents
            self._memory.host_sizes[self.host_key] = self.size

    def unpark(self) -> Moved:
        memory = self._memory
        if memory.is_fault():
            raise memory.error
        assert not self.is_resident, f"I5: {self.name} was brought in twice"
        memory.take_room(self.size)
        self.is_resident = True
        match self.parking:
            case Parking.COPY:
                self.contents = memory.host[self.host_key]
            case Parking.REBUILD:
                self.contents = self.newest
        memory.done(f"in {self.name}")
        return Moved(0 if self.parking is Parking.DROP else self.size)


@dataclass(frozen=True)
class Setup:
    """What a slab consists of."""

    parked: Collection[Role] = ALL
    """Roles whose policy is to leave while they are idle."""
    tracked: Collection[Role] = ALL
    sizes: Sequence[int] = (10,)
    """Taken in turn by the components."""
    shares_base: bool = False
    """The engine samples with the train stack's base."""
    forgets: bool = False
    """The engine's adapter is dropped when it sleeps."""
    forgets_base: bool = False
    """The engine's base is dropped when it sleeps, and would have to be loaded anew."""
    reads_parked: bool = True
    """The train stack can be read from its host copies."""
    free_bytes: int | None = None
    """Budget beside what is on the device at first; None: no budget."""
    free_for_both: int | None = None
    """The same for handoffs in which some leave while others come; None: no such handoffs."""


class Slab:
    """Three roles that share a device, and the requests that the loop makes."""

    def __init__(
        self,
        setup: Setup = Setup(),
        planner_class: type[ResidencyPlanner] = ResidencyPlanner,
        phases_class: type[Phases] = Phases,
    ) -> None:
        self.setup = setup
        self.memory = Memory()
        self.events = Events()
        self.records: list[Transition] = []
        self.used_after: list[int] = []
        """Device bytes after each of the records."""
        self.weight_version = 0
        self.readable_while_parked = setup.reads_parked
        self.onloads_due = 0
        """How often the trainer was needed on the device: steps, saves and reads there."""
        self._sizes = itertools.cycle(setup.sizes)
        self._values = itertools.count(100)
        self.parts = self._make_parts()
        budget = None if setup.free_bytes is None else self.memory.used_bytes + setup.free_bytes
        self.budget_bytes = budget
        both = self.setup.free_for_both
        self.overlap_bytes = None if both is None else self.memory.used_bytes + both
        idle = [p for role in ALL if role not in setup.tracked for p in self.parts[role]]
        self.planner = planner_class(
            policy(*setup.parked),
            {role: self.parts[role] for role in ALL if role in setup.tracked},
            self._record,
            lambda: None,
            bystanders=idle,
            budget_bytes=budget,
            overlap_bytes=self.overlap_bytes,
            announce=lambda transitions: None,
        )
        self.engine = Engine(self)
        self.sync = LocalLoraSync(self, self.engine, verify=False)
        self.phases = phases_class(
            self.engine, Reward(self), self.sync, self.planner, PhaseClock(NoMeter()), OneRank()
        )

    def _make_parts(self) -> dict[Role, list[HeldPart]]:
        part = self._part
        is_shared = self.setup.shares_base and {Role.TRAIN, Role.ROLLOUT} <= {*self.setup.tracked}
        # All copies of one network have one size.
        base_size = next(self._sizes)
        train = [
            part("train.base", base_size, contents=1, host_key="network"),
            part("train.adapter", contents=2, written_by="optimizer step"),
            part("train.moments", 0, contents=3, written_by="optimizer step"),
            part("train.buffers", written_by="forward", is_version_known=False),
            part("train.scratch", parking=Parking.DROP),
            part("train.pinned", parking=Parking.KEEP),
        ]
        rollout = [
            train[0] if is_shared else self._own_base(base_size),
            part(
                "rollout.adapter",
                contents=2,
                written_by="push",
                parking=_dropped(self.setup.forgets),
            ),
            part("rollout.graphs", parking=Parking.REBUILD, contents=5),
        ]
        reward = [
            part("reward.scorer", contents=6),
            part("reward.session", parking=Parking.REBUILD, contents=7),
        ]
        return {Role.TRAIN: train, Role.ROLLOUT: rollout, Role.REWARD: reward}

    def _own_base(self, size: int) -> HeldPart:
        return self._part(
            "rollout.base",
            size,
            contents=1,
            host_key="network",
            parking=_dropped(self.setup.forgets_base),
            written_by="reload" if self.setup.forgets_base else "nobody",
        )

    def _part(self, name: str, size: int | None = None, **options: object) -> HeldPart:
        role = Role(name.split(".")[0])
        there = INITIALLY_ON_DEVICE[role] or role not in self.setup.tracked
        size = next(self._sizes) if size is None else size
        return HeldPart(self.memory, name, size, is_resident=there, **options)  # type: ignore[arg-type]

    def _record(self, transition: Transition) -> None:
        self.records.append(transition)
        self.used_after.append(self.memory.used_bytes)
        self.events.add(transition.text)

    # --- questions ------------------------------------------------------------------------------

    @property
    def all_parts(self) -> dict[str, HeldPart]:
        return {part.name: part for parts in self.parts.values() for part in parts}

    def texts(self) -> list[str]:
        """Transitions, like `train offload`."""
        return [transition.text for transition in self.records]

    def is_whole(self, role: Role) -> bool:
        """Whether all of the role is on the device."""
        return all(part.is_resident for part in self.parts[role])

    def require_work(self, role: Role) -> None:
        """I2: what works is on the device, with its newest contents."""
        for part in self.parts[role]:
            assert part.is_resident, f"I2: {role.value} works without {part.name}"
            if not part.is_scratch:
                assert part.contents == part.newest, f"I2: {part.name} is stale"

    # --- what the loop does ---------------------------------------------------------------------

    def rollout(self, sync: bool = False, keep_awake: bool = False) -> Rollout:
        if sync and not self.sync.has_staged_adapter() and not self.setup.reads_parked:
            self.onloads_due += 1
        return self.phases.generate(REQUEST, sync_weights=sync, keep_awake=keep_awake)

    def score(self, preserve: Collection[Role] = ()) -> Rewards:
        return self.phases.score(REQUEST, empty_rollout(REQUEST), preserve)

    def step(self) -> None:
        self.onloads_due += 1
        self.planner.enter(Role.TRAIN)
        self.update()

    def update(
        self, scored: Sequence[ScoredRollout] = (), around_step: AroundStep = nullcontext
    ) -> list[UpdateStats]:
        """One optimizer step of the train stack, as `TrainRole` has it."""
        self.require_work(Role.TRAIN)
        _, adapter, moments, buffers, scratch, _ = self.parts[Role.TRAIN]
        if moments.size == 0 and self._has_room(adapter.size):
            moments.grow(adapter.size)
        buffers.write(next(self._values))
        scratch.contents = next(self._values)
        self.weight_version += 1
        for part in (adapter, moments):
            part.write(next(self._values))
        self.events.add("step")
        return [UpdateStats({})]

    def _has_room(self, num_bytes: int) -> bool:
        return self.budget_bytes is None or self.memory.used_bytes + num_bytes <= self.budget_bytes

    def push_only(self) -> None:
        """A weight sync without a generation."""
        if not self.sync.has_staged_adapter() and not self.setup.reads_parked:
            self.onloads_due += 1
        self.phases._stage_adapter()
        self.planner.enter(Role.ROLLOUT)
        self.phases._load_weights()
        self.planner.set(Role.ROLLOUT, on_device=False)

    def evaluate(self, num_chunks: int, sync: bool) -> None:
        """As `trainer.evaluation` does it."""
        keep_awake = not (sync and self.planner.parkable(Role.ROLLOUT))
        try:
            for _ in range(num_chunks):
                self.rollout(sync, keep_awake)
                self.score([Role.ROLLOUT] if keep_awake else [])
        except BaseException as error:
            self.phases.sleep_after_failure(error)
            raise
        self.planner.set(Role.ROLLOUT, on_device=False)

    def save_device(self) -> None:
        self.onloads_due += 1
        self.planner.enter(Role.TRAIN)
        self.write_checkpoint()

    def write_checkpoint(self) -> None:
        """Gathers the whole state on the device."""
        self.require_work(Role.TRAIN)
        self.events.add("save")

    def save_host(self) -> None:
        """Reads host copies of what is parked."""
        before = len(self.memory.operations)
        for part in self.parts[Role.TRAIN]:
            if part.parking is Parking.COPY:
                assert part.read() == part.newest, f"I4: the host copy of {part.name} is stale"
        assert len(self.memory.operations) == before
        self.events.add("save")

    # --- the train stack as the sync sees it ----------------------------------------------------

    def read_weights(self, *, adapter: bool, with_probe: bool) -> WeightPayload:
        part = self.all_parts["train.adapter"]
        if not self.setup.reads_parked:
            self.require_work(Role.TRAIN)
        assert part.read() == part.newest, "I4: a stale adapter was read"
        self.events.add("extract")
        tensors = {"adapter": torch.tensor(part.read())}
        return WeightPayload(self.weight_version, tensors, is_adapter=adapter, probe=None)

    # --- faults ---------------------------------------------------------------------------------

    @contextmanager
    def faults(
        self,
        *positions: int,
        error: BaseException | None = None,
        after_the_copy: bool = False,
        at_start: bool = False,
    ) -> Iterator[None]:
        """Let the moves at these positions, counted from now, raise at their end or start."""
        memory = self.memory
        memory.error = error or OSError("stuck")
        memory.faults = set() if at_start else set(positions)
        memory.faults_at_start = set(positions) if at_start else set()
        memory.fails_after_the_copy = after_the_copy
        try:
            yield
        finally:
            memory.faults, memory.fails_after_the_copy = set(), False
            memory.faults_at_start = set()


class Engine(SyncedEngine):
    """Samples nothing, and checks that it could."""

    capabilities = EngineCapabilities(
        shares_train_weights=False, emits_log_probs=True, keeps_adapter_on_sleep=True
    )

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._adapter = slab.all_parts["rollout.adapter"]
        self._loaded: int | None = None
        self._value_of_version: dict[int | None, int] = {None: self._adapter.newest}

    @property
    def parts(self) -> Sequence[Movable]:
        return self._slab.parts[Role.ROLLOUT]

    @property
    def weight_version(self) -> int | None:
        return None if self._adapter.version() is VOID else self._loaded

    def load_weights(self, payload: WeightPayload) -> LoadReport:
        base = self._slab.parts[Role.ROLLOUT][0]
        assert base.contents == base.newest, "an adapter was pushed onto a base that is not there"
        self._adapter.write(int(payload.tensors["adapter"]))
        self._loaded = payload.version
        self._value_of_version[payload.version] = self._adapter.contents
        self._slab.events.add(f"push {payload.version}")
        return LoadReport(1, "")

    def answer(self, probe: Probe) -> Tensor:
        return probe.velocity

    def generate(self, request: RolloutRequest) -> Rollout:
        self._slab.require_work(Role.ROLLOUT)
        if request.weight_version != self.weight_version:
            raise WeightSyncError("the adapter is of another version")
        expected = self._value_of_version[request.weight_version]
        assert self._adapter.contents == expected, "I2: the adapter is of another version"
        self._slab.events.add("generate")
        return empty_rollout(request)


class Reward:
    """Scores that differ within a group."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab

    def score(self, rollout: Rollout) -> Rewards:
        self._slab.require_work(Role.REWARD)
        self._slab.events.add("score")
        scores = torch.arange(len(rollout.request), dtype=torch.float32)
        return Rewards(scores, {"bright": scores}, torch.ones(len(scores), dtype=torch.bool))

    def judge(self, rollout: Rollout) -> Mapping[str, Tensor]:
        return {}

    def score_suite(self, rollout: Rollout, suite: str) -> Rewards:
        return self.score(rollout)


class Checkpoints:
    """Saves nothing every so many rollouts, and checks that it could."""

    def __init__(self, slab: Slab, interval: int, read_the_device: bool) -> None:
        self._slab = slab
        self._interval = interval
        self.read_the_device = read_the_device

    def is_due(self, rollouts_done: int) -> bool:
        return rollouts_done % self._interval == 0

    def evaluated(self, rollouts_done: int, metrics: Mapping[str, float]) -> None:
        """No checkpoint is told from another."""

    def save(self, rollouts_done: int) -> Path:
        if self.read_the_device:
            self._slab.write_checkpoint()
        else:
            self._slab.save_host()
        return Path()


def _dropped(is_dropped: bool) -> Parking:
    return Parking.DROP if is_dropped else Parking.COPY


def empty_rollout(request: RolloutRequest) -> Rollout:
    zeros = torch.zeros(len(request), 1)
    steps = torch.tensor(request.sde_steps, dtype=torch.int64)
    images = torch.zeros(len(request), 3, 1, 1, dtype=torch.uint8)
    return Rollout(
        request,
        Trajectory(zeros, zeros, zeros, steps, zeros, zeros),
        Conditioning(),
        None,
        images,
        request.sigmas,
    )
