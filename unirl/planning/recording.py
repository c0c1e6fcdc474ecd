"""Roles that do the loop's bookkeeping and no work: what a plan runs the real trainer over.

They declare the same components as a run's roles, over tensors without memory, and count versions
as those do. Each tells a `watch` function when it would work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from unirl.algorithms.making import make_algorithm
from unirl.config.schema import RunConfig
from unirl.core.capabilities import EngineCapabilities
from unirl.core.components import (
    Component,
    Movable,
    Moved,
    Parking,
    RebuiltComponent,
    StartedMove,
    TensorComponent,
    Version,
    Void,
)
from unirl.core.types import (
    Conditioning,
    Rewards,
    Rollout,
    RolloutRequest,
    ScoredRollout,
    Trajectory,
    UpdateStats,
)
from unirl.models.base import DiffusionModel
from unirl.rollout.engine import SyncedEngine
from unirl.rollout.replica import replica_components
from unirl.tracking.hacking import Divergence
from unirl.tracking.tracker import Panel
from unirl.train.backend import TrainBackend
from unirl.train.components import train_components
from unirl.trainer.archive import EvaluatedSuite
from unirl.trainer.roles import AroundStep
from unirl.weight_sync.payload import LoadReport, Probe, WeightPayload

Watch = Callable[[str], None]
"""Called with `rollout`, `reward`, `train` or `save` when that role would work."""


class RecordingPart:
    """A component that counts the bytes it would move."""

    def __init__(self, component: Component, *, is_resident: bool = True) -> None:
        """One that starts off the device was copied to the host before."""
        self._component = component
        self._known_size = 0
        self._is_resident = is_resident
        self._host_bytes = 0 if is_resident or self.parking is not Parking.COPY else self._size()
        self._parked_bytes = self._size()

    @property
    def name(self) -> str:
        return self._component.name

    @property
    def parking(self) -> Parking:
        if isinstance(self._component, RebuiltComponent):
            return Parking.REBUILD
        return self._component.parking

    @property
    def on_demand(self) -> bool:
        return isinstance(self._component, TensorComponent) and self._component.on_demand

    @property
    def written_by(self) -> str:
        return self._component.written_by

    @property
    def host_key(self) -> str:
        if isinstance(self._component, RebuiltComponent):
            return self.name
        return self._component.host_key or self.name

    @property
    def is_resident(self) -> bool:
        return self._is_resident

    def version(self) -> Version | Void:
        if isinstance(self._component, RebuiltComponent):
            return Version(0)
        return Version(self._component.version())

    def num_bytes(self) -> int:
        return self._size() if self._is_resident else self._parked_bytes

    def host_bytes(self) -> int:
        return self._host_bytes

    def park(self, *, copy: bool) -> Moved:
        self._parked_bytes = size = self._size()
        self._is_resident = False
        if copy:
            self._host_bytes = size
            return Moved(size)
        return Moved(0, dropped_bytes=size)

    def unpark(self) -> Moved:
        self._is_resident = True
        return Moved(0 if self.parking is Parking.DROP else self._parked_bytes)

    def start_park(self, *, copy: bool) -> StartedMove:
        return StartedMove.at_once(lambda: self.park(copy=copy))

    def start_unpark(self) -> StartedMove:
        return StartedMove.at_once(self.unpark)

    def _size(self) -> int:
        """Asked once it is not 0: moments appear with the first step, nothing else changes."""
        if self._known_size == 0:
            if isinstance(self._component, RebuiltComponent):
                self._known_size = self._component.num_bytes()
            else:
                self._known_size = storage_bytes(self._component.tensors())
        return self._known_size


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class RecordingStack:
    """The train stack: its moments appear with the first step, its version counts steps."""

    readable_while_parked: bool

    def __init__(
        self, model: DiffusionModel, backend: TrainBackend, config: RunConfig, watch: Watch
    ) -> None:
        """`model` is on the meta device, as trainable as in a run and laid out as `backend` has
        it."""
        self.model = model
        self.readable_while_parked = backend.holds_whole
        self._steps_per_update = config.stack.num_updates_per_batch
        algorithm = make_algorithm(config.algorithm)
        self._watch = watch
        self._moments: list[Tensor] = []
        self._on_demand = not config.optimizer_resident
        self._num_steps = 0
        parameters = dict(model.network.named_parameters())
        self._trained = [p for p in parameters.values() if p.requires_grad]
        components = train_components(
            model,
            backend,
            parameters,
            lambda: self._moments,
            lambda: self._num_steps,
            shadows={name: self._another_set() for name in algorithm.shadows()},
            teachers={name: self._another_set() for name in algorithm.teachers()},
            moments_on_demand=self._on_demand,
        )
        self.parts: Sequence[Movable] = [RecordingPart(component) for component in components]

    @property
    def weight_version(self) -> int:
        return self._num_steps

    def read_weights(self, *, adapter: bool, with_probe: bool) -> WeightPayload:
        return WeightPayload(self._num_steps, {}, is_adapter=adapter, probe=None)

    def update(self, scored: Sequence[ScoredRollout], around_step: AroundStep) -> list[UpdateStats]:
        if not self._on_demand:  # the fullest moment of the phase has them
            self._make_moments()
        self._watch("train")
        for _ in range(self._steps_per_update):
            self._num_steps += 1
            with around_step():
                self._make_moments()
                if self._on_demand:
                    self._watch("optimizer step")
        return [UpdateStats({})]

    def _another_set(self) -> dict[str, Tensor]:
        """As large as the trained weights."""
        return {str(number): torch.empty_like(p.data) for number, p in enumerate(self._trained)}

    def _make_moments(self) -> None:
        if not self._moments:
            self._moments = [torch.empty_like(p.data) for p in self._trained for _ in range(2)]


class RecordingEngine(SyncedEngine):
    """An engine with weights of its own, or one that samples with the trainer's."""

    def __init__(
        self,
        model: DiffusionModel,
        capabilities: EngineCapabilities,
        shared_base: Movable | None,
        trainer: RecordingStack,
        watch: Watch,
    ) -> None:
        self.capabilities = capabilities
        self._trainer = trainer
        self._watch = watch
        self._version: int | None = None
        self._num_loads = 0
        own = (
            []
            if capabilities.shares_train_weights
            else replica_components(
                model, lambda: self._num_loads, shares_base=shared_base is not None
            )
        )
        shared = [] if shared_base is None else [shared_base]
        self._parts = [*shared, *(RecordingPart(part, is_resident=False) for part in own)]

    @property
    def parts(self) -> Sequence[Movable]:
        return self._parts

    @property
    def weight_version(self) -> int | None:
        return self._version

    def load_weights(self, payload: WeightPayload) -> LoadReport:
        self._num_loads += 1
        self._version = payload.version
        return LoadReport(0, "")

    def answer(self, probe: Probe) -> Tensor:
        return probe.velocity

    def generate(self, request: RolloutRequest) -> Rollout:
        self._watch("rollout")
        batch = len(request)
        empty = torch.zeros(batch, 1)
        steps = torch.tensor(request.sde_steps, dtype=torch.int64)
        trajectory = Trajectory(empty, empty, empty, steps, empty, empty)
        images = torch.zeros(batch, 3, 1, 1, dtype=torch.uint8)
        return Rollout(request, trajectory, Conditioning(), None, images, request.sigmas)


class RecordingReward:
    """Scores that differ within a group."""

    def __init__(self, parts: Sequence[Component], scorers: Sequence[str], watch: Watch) -> None:
        self.parts: Sequence[Movable] = [RecordingPart(part) for part in parts]
        self._scorers = scorers
        self._watch = watch

    def score(self, rollout: Rollout) -> Rewards:
        self._watch("reward")
        scores = torch.arange(len(rollout.request), dtype=torch.float32)
        components = dict.fromkeys(self._scorers, scores)
        return Rewards(scores, components, torch.ones(len(scores), dtype=torch.bool))

    def judge(self, rollout: Rollout) -> Mapping[str, Tensor]:
        return {}

    def score_suite(self, rollout: Rollout, suite: str) -> Rewards:
        return self.score(rollout)


class RecordingCheckpoints:
    """Saves nothing, when a run would save."""

    def __init__(self, config: RunConfig, watch: Watch) -> None:
        self._config = config
        self._watch = watch

    @property
    def read_the_device(self) -> bool:
        return self._config.save_reads == "device"

    def is_due(self, rollouts_done: int) -> bool:
        return self._config.save_is_due(rollouts_done)

    def evaluated(self, rollouts_done: int, metrics: Mapping[str, float]) -> None:
        return

    def save(self, rollouts_done: int) -> Path:
        self._watch("save")
        return Path()


class NoArchive:
    """Keeps no evaluations."""

    def save(self, step: int, suites: Sequence[EvaluatedSuite]) -> list[Panel]:
        return []

    def divergences(self, step: int) -> list[Divergence]:
        return []
