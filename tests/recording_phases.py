"""The phases around roles that write down everything that happens to them, in one list.

Planner, phases and LoRA sync are the real ones; the engine samples with a real tiny model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from builders import CPU, tiny_model
from recording_roles import RecordingPart, policy
from torch import Tensor

from unirl.core.capabilities import EngineCapabilities
from unirl.core.components import Movable
from unirl.core.types import Rewards, Rollout, RolloutRequest
from unirl.distributed.ranks import OneRank
from unirl.models.tiny import TinyModel
from unirl.residency.planner import ResidencyPlanner
from unirl.residency.policy import Role
from unirl.rollout.engine import SyncedEngine
from unirl.rollout.sampling import sample_with_model
from unirl.trainer.clock import NoMeter, PhaseClock
from unirl.trainer.phases import Phases
from unirl.weight_sync.base import WeightSync
from unirl.weight_sync.full import LocalFullSync
from unirl.weight_sync.lora import LocalLoraSync
from unirl.weight_sync.payload import LoadReport, Probe, WeightPayload


@dataclass
class Events:
    """What happened, and which events fail."""

    seen: list[str] = field(default_factory=list)
    failing: dict[str, BaseException] = field(default_factory=dict)

    def add(self, event: str) -> None:
        if event in self.failing:
            raise self.failing[event]
        self.seen.append(event)

    def take(self) -> list[str]:
        """Events since the last call."""
        taken, self.seen = self.seen, []
        return taken

    def part(self, role: Role, is_resident: bool = True) -> RecordingPart:
        """All of a role as one component that says when it moves."""

        def on_move(part: RecordingPart, move: str) -> None:
            self.add(f"{role.value} {move}")

        return RecordingPart(f"{role.value}.weights", is_resident=is_resident, on_move=on_move)


class RecordingTrainer:
    """The train stack as the sync sees it."""

    def __init__(self, events: Events, readable_while_parked: bool) -> None:
        self._events = events
        self.weight_version = 0
        self.readable_while_parked = readable_while_parked

    def read_weights(self, *, adapter: bool, with_probe: bool) -> WeightPayload:
        self._events.add("extract")
        return WeightPayload(self.weight_version, {}, is_adapter=adapter, probe=None)


class RecordingEngine(SyncedEngine):
    """Samples with a tiny model; forgets its adapter on sleep when `forgets`."""

    capabilities = EngineCapabilities(
        shares_train_weights=False, emits_log_probs=True, keeps_adapter_on_sleep=False
    )

    def __init__(self, events: Events, model: TinyModel, forgets: bool) -> None:
        self._events = events
        self._model = model
        self._version: int | None = None

        def on_move(part: RecordingPart, move: str) -> None:
            events.add(f"rollout {move}")
            if move == "offload" and forgets:
                self._version = None

        self._part = RecordingPart("rollout.weights", is_resident=False, on_move=on_move)

    @property
    def parts(self) -> Sequence[Movable]:
        return [self._part]

    @property
    def weight_version(self) -> int | None:
        return self._version

    def load_weights(self, payload: WeightPayload) -> LoadReport:
        self._events.add(f"push {payload.version}")
        self._version = payload.version
        return LoadReport(0, "")

    def answer(self, probe: Probe) -> Tensor:
        return probe.velocity

    def generate(self, request: RolloutRequest) -> Rollout:
        assert request.weight_version == self._version
        self._events.add("generate")
        return sample_with_model(self._model, request, 0, CPU)


class RecordingReward:
    """Scores with the mean brightness."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def score(self, rollout: Rollout) -> Rewards:
        self._events.add("score")
        scores = rollout.images.float().mean(dim=(1, 2, 3)) / 255
        return Rewards(scores, {"bright": scores}, torch.ones(len(scores), dtype=torch.bool))

    def judge(self, rollout: Rollout) -> Mapping[str, Tensor]:
        self._events.add("judge")
        return {"dark": 1 - rollout.images.float().mean(dim=(1, 2, 3)) / 255}

    def score_suite(self, rollout: Rollout, suite: str) -> Rewards:
        self._events.add(f"score {suite}")
        scores = rollout.images.float().std(dim=(1, 2, 3)) / 255
        return Rewards(2 * scores, {"wild": scores}, torch.ones(len(scores), dtype=torch.bool))


class RecordingPhases:
    """`phases` for the code under test, and what its roles saw."""

    def __init__(
        self,
        parked: Sequence[Role],
        *,
        full_sync: bool = False,
        engine_forgets: bool = False,
        readable_while_parked: bool = True,
    ) -> None:
        self.events = Events()
        self.trainer = RecordingTrainer(self.events, readable_while_parked)
        self.model = tiny_model()
        self.engine = RecordingEngine(self.events, self.model, engine_forgets)
        sync_class = LocalFullSync if full_sync else LocalLoraSync
        self.sync: WeightSync = sync_class(self.trainer, self.engine, verify=False)
        components: dict[Role, Sequence[Movable]] = {
            Role.TRAIN: [self.events.part(Role.TRAIN)],
            Role.ROLLOUT: self.engine.parts,
            Role.REWARD: [self.events.part(Role.REWARD)],
        }
        self.planner = ResidencyPlanner(
            policy(*parked), components, lambda transition: None, OneRank().barrier
        )
        self.phases = Phases(
            self.engine,
            RecordingReward(self.events),
            self.sync,
            self.planner,
            PhaseClock(NoMeter()),
            OneRank(),
        )

    def step(self) -> None:
        """What the loop does around an optimizer step."""
        self.planner.enter(Role.TRAIN)
        self.trainer.weight_version += 1
        self.events.add("step")
