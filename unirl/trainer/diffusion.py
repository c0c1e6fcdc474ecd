"""The loop. Read this file first.

    rollout -> reward -> advantage -> optimizer step -> evaluate -> save

One slab of devices is shared by three roles: the train stack, the rollout engine and the reward
service. Each device is driven by a rank of its own, which runs this same text. This file says what
happens in which order; who is on the device when is decided by the `ResidencyPlanner`, which the
phases tell what comes next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from unirl.algorithms.advantage import AdvantageRule
from unirl.config.schema import RunConfig
from unirl.core.errors import CheckpointError, RewardError
from unirl.core.types import ScoredRollout
from unirl.data.stream import PromptStream
from unirl.distributed.sharding import own_prompts, sample_places
from unirl.residency.policy import Role
from unirl.tracking.tracker import Tracker
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.logbook import Logbook
from unirl.trainer.phases import Phases
from unirl.trainer.progress import Progress
from unirl.trainer.requests import RequestFactory
from unirl.trainer.roles import MoveRecord, SaveRole, TrainRole
from unirl.trainer.windows import sync_is_due, windows

logger = logging.getLogger("unirl.trainer")


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    rollouts_done: int
    num_rollouts: int
    interrupted: bool
    ended_by: str | None = None
    """The condition of stop_on that was met, be it after the last rollout."""


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
        self._transitions = transitions
        self._should_stop = should_stop
        self._logbook = Logbook(tracker, transitions, progress, phases.clock, phases.ranks)
        self._advantage_rule = AdvantageRule.of(config)
        self._begun_at: int | None = None
        self._evaluation_dropped = False
        self._met: str | None = None
        """A condition of stop_on."""
        self._done = self._saved = 0
        """Rollouts trained on, and how many of them are in a checkpoint."""
        self._version_done = stack.weight_version
        """Of the weights after them."""

    def train(self, start: int) -> TrainResult:
        """Run rollouts from `start` up to num_rollouts, or until asked to stop, or until a
        condition of stop_on is met.

        `start` is above 0 when the roles were restored from a checkpoint. A run that is stopped
        early, or that fails outside of an optimizer step, writes a checkpoint first.
        """
        total = self._config.num_rollouts
        self._begun_at = start if start > 0 or self._config.start_from is not None else None
        self._done = self._saved = start
        self._version_done = self._stack.weight_version
        try:
            self._run(start)
        except Exception as error:
            self._save_what_is_whole(error)
            raise
        interrupted = self._done < total or self._evaluation_dropped
        if interrupted and self._done > self._saved:
            self._save(self._done)
        return TrainResult(self._done, total, interrupted, self._met)

    def _run(self, start: int) -> None:
        config = self._config
        if config.evaluation_is_due(start):
            self._evaluate(start)
        elif "hacking" in config.stop_on and self._evaluator.is_hacked(start):
            self._met = "hacking"  # an evaluation that stands, under another eval_interval
        for window in windows(start, config.num_rollouts, config.accumulate_rollouts):
            if self._met or self._should_stop() or not self.train_window(window):
                break
            self._done, self._version_done = window[-1] + 1, self._stack.weight_version
            if config.evaluation_is_due(self._done):
                self._evaluate(self._done)
            if self._checkpoints.is_due(self._done):
                self._save(self._done)

    def train_window(self, window: range) -> bool:
        """Collect accumulate_rollouts rollouts, then train on all of them at once.

        False, with nothing trained, when the run was asked to stop between two phases: the window
        is collected again, and alike, when the run is resumed.
        """
        clock = self._phases.clock
        with clock.phase("total"):
            scored = self._collect_window(window)
            if scored is None:
                return False
            with clock.phase("train"):
                self._phases.residency.enter(Role.TRAIN)
                updates = self._stack.update(scored, self._optimizer_there)
        self._logbook.window(window[-1], self._stack.weight_version, scored, updates)
        return True

    def _collect_window(self, window: range) -> list[ScoredRollout] | None:
        """None when the run was asked to stop meanwhile."""
        scored = []
        for rollout_id in window:
            one = self._collect(rollout_id)
            if one is None or self._should_stop():
                return None
            scored.append(one)
        return scored

    def _collect(self, rollout_id: int) -> ScoredRollout | None:
        """Sample and score one rollout, and compare each sample with its siblings."""
        config = self._config
        self._transitions.at(rollout_id, "window")
        request = self._requests.training(rollout_id, self._prompts.batch(rollout_id))
        was_saved = self._checkpoints.is_due(rollout_id)
        interval = config.weight_sync_interval
        sync_due = sync_is_due(rollout_id, interval, self._begun_at, was_saved)
        rollout = self._phases.generate(request, sync_weights=sync_due)
        if self._should_stop():
            return None
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
        self._checkpoints.evaluated(rollouts_done, evaluation.metrics)
        self._logbook.evaluation(rollouts_done, self._stack.weight_version, evaluation)
        if evaluation.is_hacked and "hacking" in self._config.stop_on:
            self._met = "hacking"

    def _save(self, rollouts_done: int) -> None:
        self._transitions.at(rollouts_done, "save")
        with self._phases.clock.phase("save"):
            if self._checkpoints.read_the_device:
                self._phases.residency.enter(Role.TRAIN)
                with self._phases.residency.borrowed("save"):
                    self._checkpoints.save(rollouts_done)
            else:
                self._checkpoints.save(rollouts_done)
        self._saved = rollouts_done

    def _save_what_is_whole(self, error: Exception) -> None:
        """Before a failed run ends: the weights of the last window, unless a step tore them.

        On several ranks only after a failed reward, which all of them know of: the others may be
        waiting in some exchange. A save that failed is not tried again.
        """
        all_know = self._phases.ranks.world_size == 1 or isinstance(error, RewardError)
        is_whole = self._stack.weight_version == self._version_done
        is_disk = isinstance(error, CheckpointError)
        if is_disk or not (all_know and is_whole and self._done > self._saved):
            return
        try:
            self._save(self._done)
        except Exception as second:
            logger.warning("the state after %d rollouts is lost: %s", self._done, second)
            return
        logger.warning("the run failed; its first %d rollouts are saved", self._done)

    def _optimizer_there(self) -> AbstractContextManager[None]:
        return self._phases.residency.borrowed("optimizer step")
