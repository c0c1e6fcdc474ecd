"""Runs the real `DiffusionTrainer` over roles that only take notes, and returns the notes.

The loop, the planner, the weight sync, the evaluation and the schedule of saves are a run's own;
only the roles' work is left out. So what is written down here is what a run will write.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from unirl.algorithms.making import make_algorithm
from unirl.config import catalog
from unirl.config.components import engine_capabilities, import_component, sync_name
from unirl.config.residency_checks import in_shards
from unirl.config.schema import RunConfig
from unirl.config.suites import asked_suites
from unirl.core.components import Component, Movable
from unirl.core.types import PromptRecord, PromptSuite
from unirl.data.stream import PromptStream
from unirl.distributed.ranks import OneRank
from unirl.models.base import DiffusionModel
from unirl.models.blocks import find_blocks
from unirl.planning.recording import (
    NoArchive,
    RecordingCheckpoints,
    RecordingEngine,
    RecordingReward,
    RecordingStack,
    Watch,
)
from unirl.residency.plan import PhaseNote
from unirl.residency.planner import ResidencyPlanner
from unirl.residency.policy import KeepRule, Role
from unirl.residency.timeline import PhaseKind
from unirl.residency.trace import lines_of
from unirl.residency.transition import Transition
from unirl.tracking.tracker import Tracker
from unirl.train.backend import TrainBackend, WholeBackend
from unirl.trainer.clock import NoMeter, PhaseClock
from unirl.trainer.diffusion import DiffusionTrainer
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.phases import Phases
from unirl.trainer.progress import Progress
from unirl.trainer.requests import RequestFactory
from unirl.weight_sync.base import SharedWeights


@dataclass(frozen=True)
class Networks:
    """What a plan needs of the models, on the meta device and as trainable as in a run."""

    trained: DiffusionModel
    """With text encoders and decoder only where sampling uses the trained weights."""
    sampled: DiffusionModel
    """The engine's, with text encoders and decoder; the trained one where it is shared."""
    block_classes: Sequence[str]


@dataclass(frozen=True)
class Counts:
    """How many records the prompt files hold, as far as they decide what a run does."""

    train: int
    suites: tuple[int, ...]
    """Prompts of each suite that is evaluated, data.eval's first."""


@dataclass(frozen=True)
class Notes:
    """What a run would do."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    """As in transitions.jsonl, without seconds that mean anything."""
    phases: list[PhaseNote] = field(default_factory=list)
    host_bytes: dict[str, int] = field(default_factory=dict)
    """Host copies at the end, by host key."""
    parts: dict[str, Movable] = field(default_factory=dict)
    roles: dict[Role, tuple[str, ...]] = field(default_factory=dict)
    """Components of each role that shares the slab."""


class _Recorder:
    """The `MoveRecord` of a simulated run, and what its roles tell."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.planner: ResidencyPlanner | None = None
        self._rollout = 0
        self._during = "start"

    def at(self, rollout: int, during: str) -> None:
        self._rollout = rollout
        self._during = during

    def record(self, transition: Transition) -> None:
        for line in lines_of(transition, transition.seq, self._rollout, self._during):
            self.notes.lines.append({"seq": len(self.notes.lines) + 1, **line})

    def phase_ended(self, name: str, seconds: float) -> None:
        return

    def take_metrics(self) -> dict[str, float]:
        return {}

    def watch(self, role: str) -> None:
        assert self.planner is not None
        states = dict(self.planner.snapshot())
        parts = self.notes.parts
        there = {name: parts[name].num_bytes() for name in parts if parts[name].is_resident}
        kind = PhaseKind(f"evaluation {role}" if self._during == "evaluation" else role)
        note = PhaseNote(kind, self._rollout, len(self.notes.lines), there, states)
        self.notes.phases.append(note)


def simulate(
    config: RunConfig,
    networks: Networks,
    reward_parts: Sequence[Component],
    rule: KeepRule,
    counts: Counts,
    overlap_bytes: int | None = None,
) -> Notes:
    """Notes of a whole run of `config`; cut config.num_rollouts for a part of it.

    overlap_bytes: as `ResidencyPlanner` takes it.
    """
    recorder = _Recorder()
    with ExitStack() as group:
        backend = _lay_out(config, networks, group)
        stack = RecordingStack(networks.trained, backend, config, recorder.watch)
        engine = _engine(config, networks, stack, recorder.watch)
        trainer = _assemble(
            config, networks, stack, engine, reward_parts, rule, counts, overlap_bytes, recorder
        )
        trainer.train(start=0)
    for part in recorder.notes.parts.values():
        held = recorder.notes.host_bytes
        held[part.host_key] = max(part.host_bytes(), held.get(part.host_key, 0))
    return recorder.notes


def _lay_out(config: RunConfig, networks: Networks, group: ExitStack) -> TrainBackend:
    """Shard the trained network as the run's rank 0 would hold it."""
    if not in_shards(config):
        return WholeBackend()
    from unirl.planning.layout import pretended_group
    from unirl.train.sharded import ShardedBackend, make_mesh

    group.enter_context(pretended_group(0, config.num_devices))
    mesh = make_mesh(config.backend, config.num_devices, torch.device("cpu"))
    network = networks.trained.network
    decided = config.backend.model_copy(update={"defer_reduce": config.defers_reduce})
    return ShardedBackend(network, find_blocks(network, networks.block_classes), mesh, decided)


def _engine(
    config: RunConfig, networks: Networks, stack: RecordingStack, watch: Watch
) -> RecordingEngine:
    base = next(part for part in stack.parts if part.name == "train.base")
    return RecordingEngine(
        networks.sampled,
        engine_capabilities(config),
        base if config.rollout.share_base else None,
        stack,
        watch,
    )


def _assemble(
    config: RunConfig,
    networks: Networks,
    stack: RecordingStack,
    engine: RecordingEngine,
    reward_parts: Sequence[Component],
    rule: KeepRule,
    counts: Counts,
    overlap_bytes: int | None,
    recorder: _Recorder,
) -> DiffusionTrainer:
    scorers = list(config.reward.scorers) if config.reward else []
    reward = RecordingReward(reward_parts, scorers, recorder.watch)
    components = {Role.ROLLOUT: engine.parts, Role.REWARD: reward.parts}
    if not engine.capabilities.shares_train_weights:
        components[Role.TRAIN] = stack.parts
    recorder.notes.roles.update({r: tuple(p.name for p in ps) for r, ps in components.items()})
    for part in [*stack.parts, *engine.parts, *reward.parts]:
        recorder.notes.parts[part.name] = part
    planner = ResidencyPlanner(
        rule,
        components,
        recorder.record,
        lambda: None,
        bystanders=stack.parts,
        overlap_bytes=overlap_bytes,
        announce=lambda transitions: None,
    )
    recorder.planner = planner
    name = sync_name(config)
    sync = (
        SharedWeights(stack)
        if name is None
        else import_component(catalog.SYNCS[name].path)(stack, engine, False)
    )
    phases = Phases(engine, reward, sync, planner, PhaseClock(NoMeter()), OneRank())
    requests = RequestFactory(config, networks.sampled, make_algorithm(config.algorithm))
    suites = [
        PromptSuite(asked.name, _records(asked.name, count), asked.samples_per_prompt)
        for asked, count in zip(asked_suites(config), counts.suites, strict=True)
    ]
    return DiffusionTrainer(
        config,
        stack,
        phases,
        PromptStream(_records("train", counts.train), config.batch_size, config.seed),
        requests,
        Evaluator(config, phases, requests, suites, NoArchive(), lambda: False),
        RecordingCheckpoints(config, recorder.watch),
        Tracker([]),
        recorder,
        lambda: False,
        Progress(config.num_devices),
    )


def _records(name: str, count: int) -> tuple[PromptRecord, ...]:
    ids = [f"{name} {number}" for number in range(count)]
    return tuple(PromptRecord(prompt_id, text=prompt_id) for prompt_id in ids)
