"""The loop. Read this file first.

    rollout -> reward -> advantage -> optimizer step -> evaluate -> save

One slab of devices is shared by three roles: the train stack, the rollout engine and the reward
service. Each device is driven by a rank of its own, which runs this same text. This file says what
happens in which order; who is on the device when is decided by the `ResidencyPlanner`, which the
phases tell what comes next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from unirl.algorithms.advantage import AdvantageRule
from unirl.config.schema import RunConfig
from unirl.core.types import ScoredRollout
from unirl.data.stream import PromptStream
from unirl.distributed.sharding import own_prompts, sample_places
from unirl.residency.policy import Role
from unirl.tracking.tracker import Row, RowKind, Tracker
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.phases import Phases
from unirl.trainer.progress import Progress
from unirl.trainer.requests import RequestFactory
from unirl.trainer.roles import MoveRecord, SaveRole, TrainRole
from unirl.trainer.window_metrics import rollout_metrics, train_metrics, trained_forwards
from unirl.trainer.windows import sync_is_due, windows

logger = logging.getLogger("unirl.trainer")


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    rollouts_done: int
    num_rollouts: int
    interrupted: bool


class DiffusionTrainer:
    """Trains a diffusion model on rewards of its own samples."""

    def __init__(
        self,
        config: RunConfig,
        stack: TrainRole,
        phases: Phases,
        prompts: PromptStream,
        requests: RequestFactory,
        evaluator: Evaluator,
        checkpoints: SaveRole,
        tracker: Tracker,
        transitions: MoveRecord,
        should_stop: Callable[[], bool],
        progress: Progress,
    ) -> None:
        self._config = config
        self._stack = stack
        self._phases = phases
        self._prompts = prompts
        self._requests = requests
        self._evaluator = evaluator
        self._checkpoints = checkpoints
        self._tracker = tracker
        self._transitions = transitions
        self._should_stop = should_stop
        self._progress = progress
        self._advantage_rule = AdvantageRule.of(config)
        self._resumed_at: int | None = None
        self._evaluation_dropped = False

    def train(self, start: int) -> TrainResult:
        """Run rollouts from `start` up to num_rollouts, or until asked to stop.

        `start` is above 0 when the roles were restored from a checkpoint. A run that is stopped
        early writes a checkpoint first.
        """
        config = self._config
        done = start
        self._resumed_at = start if start > 0 else None
        if config.eval_interval > 0:
            self._evaluate(start)
        for window in windows(start, config.num_rollouts, config.accumulate_rollouts):
            if self._should_stop():
                break
            self.train_window(window)
            done = window[-1] + 1
            if config.eval_interval > 0 and done % config.eval_interval == 0:
                self._evaluate(done)
            if self._checkpoints.is_due(done):
                self._save(done)
        interrupted = done < config.num_rollouts or self._evaluation_dropped
        if interrupted and done > start and not self._checkpoints.is_due(done):
            self._save(done)
        return TrainResult(done, config.num_rollouts, interrupted)

    def train_window(self, window: range) -> None:
        """Collect accumulate_rollouts rollouts, then train on all of them at once."""
        clock = self._phases.clock
        with clock.phase("total"):
            scored = [self._collect(rollout_id) for rollout_id in window]
            with clock.phase("train"):
                self._phases.residency.enter(Role.TRAIN)
                updates = self._stack.update(scored, self._optimizer_there)
        metrics = rollout_metrics(scored) | train_metrics(updates) | self._take_costs()
        metrics["train/optimizer_step"] = float(self._stack.weight_version)
        metrics["perf/samples_per_second"] = (
            metrics["rollout/num_samples"] / metrics["perf/total_seconds"]
        )
        self._count(metrics)
        self._log("rollout", window[-1], metrics)

    def _collect(self, rollout_id: int) -> ScoredRollout:
        """Sample and score one rollout, and compare each sample with its siblings."""
        config = self._config
        self._transitions.at(rollout_id, "window")
        request = self._requests.training(rollout_id, self._prompts.batch(rollout_id))
        sync_due = sync_is_due(rollout_id, config.weight_sync_interval, self._resumed_at)
        rollout = self._phases.generate(request, sync_weights=sync_due)
        rewards = self._phases.score(request, rollout)
        prompts = own_prompts(len(request.prompts), self._phases.ranks)
        return ScoredRollout(
            rollout.request,
            rollout.trajectory,
            rollout.conditioning,
            rollout.negative_conditioning,
            sample_places(prompts, request.samples_per_prompt),
            rewards,
            self._advantage_rule.advantages(rewards),
            self._advantage_rule.trained(rewards),
        )

    def _evaluate(self, rollouts_done: int) -> None:
        self._transitions.at(rollouts_done, "evaluation")
        with self._phases.clock.phase("evaluate"):
            evaluation = self._evaluator.run(rollouts_done, sync_weights=True)
        if evaluation is None:
            self._evaluation_dropped = True
            return
        self._log("eval", rollouts_done, evaluation.metrics)
        for panel in evaluation.panels:
            self._tracker.show(panel)

    def _save(self, rollouts_done: int) -> None:
        self._transitions.at(rollouts_done, "save")
        with self._phases.clock.phase("save"):
            if not self._checkpoints.read_the_device:
                self._checkpoints.save(rollouts_done)
                return
            self._phases.residency.enter(Role.TRAIN)
            with self._phases.residency.borrowed("save"):
                self._checkpoints.save(rollouts_done)

    def _optimizer_there(self) -> AbstractContextManager[None]:
        return self._phases.residency.borrowed("optimizer step")

    def _count(self, metrics: Mapping[str, float]) -> None:
        """Add a window to what the run has cost on all ranks."""
        forwards = sum(self._phases.ranks.gather(trained_forwards(metrics)))
        self._progress.add_window(metrics["rollout/num_samples"], forwards)

    def _log(self, kind: RowKind, rollout: int, metrics: Mapping[str, float]) -> None:
        metrics = {**metrics, **self._progress.metrics()}
        self._tracker.log(Row(kind, rollout, self._stack.weight_version, metrics))

    def _take_costs(self) -> dict[str, float]:
        """Seconds and moves since the last row; evaluation and save count to the next one."""
        return self._phases.clock.take_metrics() | self._transitions.take_metrics()
