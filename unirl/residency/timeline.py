"""The phases of a run in order, known before it starts: who will need the device when.

In go a config and where the run starts; out come the phases one by one, in the order in which the
loop (`trainer.diffusion`) tells the planner who works next. A weight sync is no phase of its own:
the adapter is read where the trainer is. A run that is interrupted leaves the timeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from unirl.config.schema import RunConfig
from unirl.residency.policy import Role


class PhaseKind(Enum):
    """What happens in a phase. Phases of one kind need the same weights and the same workspace."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAIN = "train"
    STEP = "optimizer step"
    """Within `train`, where the optimizer's moments come only for it; never on the timeline."""
    EVALUATE_ROLLOUT = "evaluation rollout"
    EVALUATE_REWARD = "evaluation reward"
    SAVE = "save"

    @property
    def role(self) -> Role:
        """Who works in it."""
        match self:
            case PhaseKind.ROLLOUT | PhaseKind.EVALUATE_ROLLOUT:
                return Role.ROLLOUT
            case PhaseKind.REWARD | PhaseKind.EVALUATE_REWARD:
                return Role.REWARD
            case PhaseKind.TRAIN | PhaseKind.STEP | PhaseKind.SAVE:
                return Role.TRAIN


@dataclass(frozen=True)
class Phase:
    """One stretch of a run in which one role works."""

    kind: PhaseKind
    rollout: int
    """The rollout it belongs to, for `train` the window's last; for an evaluation or a save, the
    number of rollouts done."""


def timeline(config: RunConfig, start: int, suite_sizes: Sequence[int]) -> Iterator[Phase]:
    """The phases from rollout `start` to the end of the run, made one at a time.

    `suite_sizes`: prompts that an evaluation has of data.eval and of each suite.
    """
    if config.evaluation_is_due(start):
        yield from _evaluation(config, start, suite_sizes)
    for first in range(start, config.num_rollouts, config.accumulate_rollouts):
        done = min(first + config.accumulate_rollouts, config.num_rollouts)
        for rollout in range(first, done):
            yield Phase(PhaseKind.ROLLOUT, rollout)
            yield Phase(PhaseKind.REWARD, rollout)
        yield Phase(PhaseKind.TRAIN, done - 1)
        if config.evaluation_is_due(done):
            yield from _evaluation(config, done, suite_sizes)
        if config.save_reads == "device" and config.save_is_due(done):
            yield Phase(PhaseKind.SAVE, done)


def plain_window(config: RunConfig) -> tuple[PhaseKind, ...]:
    """The phases of an optimizer window without evaluation and save, ending with the step."""
    num_rollouts = min(config.accumulate_rollouts, config.num_rollouts)
    return (PhaseKind.ROLLOUT, PhaseKind.REWARD) * num_rollouts + (PhaseKind.TRAIN,)


def phase_kinds(config: RunConfig) -> frozenset[PhaseKind]:
    """The kinds of phases that a run of this config can have."""
    kinds = set(plain_window(config))
    if config.eval_interval > 0:
        kinds |= {PhaseKind.EVALUATE_ROLLOUT, PhaseKind.EVALUATE_REWARD}
    if _saves_on_device(config):
        kinds.add(PhaseKind.SAVE)
    return frozenset(kinds)


def segments(phases: Iterable[Phase]) -> Iterator[tuple[Phase, ...]]:
    """The same phases, cut after each optimizer step; read no further than needed."""
    segment: list[Phase] = []
    for phase in phases:
        segment.append(phase)
        if phase.kind is PhaseKind.TRAIN:
            yield tuple(segment)
            segment = []
    if segment:
        yield tuple(segment)


def _evaluation(
    config: RunConfig, rollouts_done: int, suite_sizes: Sequence[int]
) -> Iterator[Phase]:
    for num_prompts in suite_sizes:
        for _ in range(0, num_prompts, config.eval_chunk_prompts):
            yield Phase(PhaseKind.EVALUATE_ROLLOUT, rollouts_done)
            yield Phase(PhaseKind.EVALUATE_REWARD, rollouts_done)


def _saves_on_device(config: RunConfig) -> bool:
    return config.save_interval > 0 and config.save_reads == "device"
