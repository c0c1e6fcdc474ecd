"""The phases every rollout goes through, in training and in evaluation alike.

This is the one place that tells the residency planner which role works next and when weights are
read, pushed and slept on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from unirl.core.types import Rewards, Rollout, RolloutRequest
from unirl.residency.planner import ResidencyPlanner
from unirl.residency.policy import Role
from unirl.reward.service import RewardService
from unirl.rollout.engine import RolloutEngine
from unirl.trainer.clock import PhaseClock
from unirl.weight_sync.base import StagedWeightSync, WeightSync


@dataclass(frozen=True)
class Phases:
    """Generate and score on one slab."""

    engine: RolloutEngine
    reward: RewardService
    sync: WeightSync
    residency: ResidencyPlanner
    clock: PhaseClock

    def generate(
        self, request: RolloutRequest, *, sync_weights: bool, keep_awake: bool = False
    ) -> Rollout:
        """Sample the request, after a weight sync when asked.

        The engine sleeps afterwards unless it is pinned or `keep_awake`; after a failure it sleeps
        in any case unless it is pinned. The trainer is not brought back: the next phase decides.
        """
        if sync_weights:
            self._stage_adapter()
        with self.clock.phase("rollout"):
            self.residency.enter(Role.ROLLOUT)
            try:
                if sync_weights:
                    self._load_weights()
                version = self.sync.published_version
                rollout = self.engine.generate(replace(request, weight_version=version))
            except BaseException as error:
                self.sleep_after_failure(error)
                raise
            if not keep_awake:
                self.residency.set(Role.ROLLOUT, on_device=False)
        return rollout

    def score(self, rollout: Rollout, preserve: Collection[Role] = ()) -> Rewards:
        """Run the reward phase; roles in `preserve` stay on the device through it."""
        with self.clock.phase("reward"):
            self.residency.enter(Role.REWARD, preserve)
            return self.reward.score(rollout)

    def judge(self, rollout: Rollout) -> Mapping[str, Tensor]:
        """Scores of the judges; belongs to the reward phase that `score` entered."""
        with self.clock.phase("reward"):
            return self.reward.judge(rollout)

    def _stage_adapter(self) -> None:
        """Read the adapter while the trainer can still be read, when it is about to be parked.

        `enter`, not `set`: the trainer must not come back beside a resident reward.
        """
        if not isinstance(self.sync, StagedWeightSync) or self.sync.has_staged_adapter():
            return
        if self.residency.parkable(Role.TRAIN):
            with self.clock.phase("sync"):
                self.residency.enter(Role.TRAIN)
                self.sync.extract()

    def _load_weights(self) -> None:
        with self.clock.phase("sync"):
            self.sync.sync()

    def sleep_after_failure(self, error: BaseException) -> None:
        """Free the device after a failed generate; a second failure must not hide the first."""
        try:
            self.residency.set(Role.ROLLOUT, on_device=False)
        except Exception as second:
            error.add_note(f"putting the rollout engine to sleep failed too: {second}")
