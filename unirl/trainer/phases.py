"""The phases every rollout goes through, in training and in evaluation alike.

This is the one place that tells the residency planner which role works next and when weights are
read, pushed and slept on. On several ranks each generates and scores its own part of a request;
scores are those of all its samples, the same on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from unirl.core.errors import RewardError
from unirl.core.types import Rewards, Rollout, RolloutRequest
from unirl.distributed.ranks import Ranks
from unirl.distributed.sharding import join_samples, own_part
from unirl.residency.planner import ResidencyPlanner
from unirl.residency.policy import Role
from unirl.rollout.echo import require_as_asked
from unirl.trainer.clock import PhaseClock
from unirl.trainer.roles import RewardRole, RolloutRole
from unirl.weight_sync.base import StagedWeightSync, WeightSync

logger = logging.getLogger("unirl.trainer")


@dataclass(frozen=True)
class Phases:
    """Generate and score on one slab."""

    engine: RolloutRole
    reward: RewardRole
    sync: WeightSync
    residency: ResidencyPlanner
    clock: PhaseClock
    ranks: Ranks

    def generate(
        self, request: RolloutRequest, *, sync_weights: bool, keep_awake: bool = False
    ) -> Rollout:
        """Sample this rank's part of the request, after a weight sync when asked.

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
                self.residency.require_live(Role.ROLLOUT)
                version = self.sync.published_version
                own = own_part(replace(request, weight_version=version), self.ranks)
                rollout = self.engine.generate(own)
                require_as_asked(own, rollout)
            except BaseException as error:
                self.sleep_after_failure(error)
                raise
            if not keep_awake:
                self.residency.set(Role.ROLLOUT, on_device=False)
        return rollout

    def score(
        self, request: RolloutRequest, rollout: Rollout, preserve: Collection[Role] = ()
    ) -> Rewards:
        """Rewards of all samples of the request; roles in `preserve` stay on the device meanwhile.

        Raises RewardError on all ranks when a scorer fails for good on one, or when every group
        was dropped.
        """
        with self.clock.phase("reward"):
            self.residency.enter(Role.REWARD, preserve)
            own = self.ranks.together(lambda: self.reward.score(rollout))
            rewards = self._join_rewards(own, len(request.prompts))
        self._report_dropped(rewards, request)
        if not rewards.valid.any():
            raise RewardError("every prompt group of this rollout was dropped by failed scores")
        return rewards

    def judge(self, request: RolloutRequest, rollout: Rollout) -> Mapping[str, Tensor]:
        """Judges' scores of all samples; belongs to the reward phase that `score` entered.

        A judge that failed on one rank is left out on all.
        """
        with self.clock.phase("reward"):
            parts = self.ranks.gather(dict(self.reward.judge(rollout)))
        names = [name for name in parts[0] if all(name in part for part in parts)]
        num_prompts = len(request.prompts)
        return {name: join_samples([part[name] for part in parts], num_prompts) for name in names}

    def score_suite(
        self,
        request: RolloutRequest,
        rollout: Rollout,
        suite: str,
        preserve: Collection[Role] = (),
    ) -> Rewards:
        """What an evaluation suite's own scorers say of all samples; a reward phase of its own.

        A scorer that failed on one rank has NaN for that rank's samples.
        """
        with self.clock.phase("reward"):
            self.residency.enter(Role.REWARD, preserve)
            own = self.reward.score_suite(rollout, suite)
            return self._join_rewards(own, len(request.prompts))

    def _report_dropped(self, rewards: Rewards, request: RolloutRequest) -> None:
        """Other ranks' warnings are in their own logs; rank 0 at least gives the number."""
        dropped = int((~rewards.valid).sum()) // request.samples_per_prompt
        if dropped and self.ranks.world_size > 1 and self.ranks.is_main:
            logger.warning(
                "%d of %d prompt groups dropped; logs/rank-<r>.log has the reasons of other ranks",
                dropped,
                len(request.prompts),
            )

    def _join_rewards(self, own: Rewards, num_prompts: int) -> Rewards:
        parts = self.ranks.gather(own)
        return Rewards(
            total=join_samples([part.total for part in parts], num_prompts),
            components={
                name: join_samples([part.components[name] for part in parts], num_prompts)
                for name in own.components
            },
            valid=join_samples([part.valid for part in parts], num_prompts),
        )

    def _stage_adapter(self) -> None:
        """Read the adapter before the engine takes the device, when the trainer may leave it.

        A parked trainer is read from its host copy and nothing moves; one in shards comes back,
        because shards are gathered there. On the device it needs room to answer a probe, and must
        not be beside a resident reward.
        """
        if not isinstance(self.sync, StagedWeightSync) or self.sync.has_staged_adapter():
            return
        if not self.residency.parkable(Role.TRAIN):
            return
        with self.clock.phase("sync"):
            if self.residency.is_on_device(Role.TRAIN) or not self.sync.reads_parked:
                self.residency.make_room(Role.TRAIN)
                self.residency.set(Role.TRAIN, on_device=True)
            self.sync.extract()

    def _load_weights(self) -> None:
        with self.clock.phase("sync"):
            self.residency.require_live(Role.ROLLOUT, besides="push")
            self.sync.sync()

    def sleep_after_failure(self, error: BaseException) -> None:
        """Free the device after a failed generate; a second failure must not hide the first.

        Not on several ranks: they end together, and moving would wait for the others in vain.
        """
        if self.ranks.world_size > 1:
            return
        try:
            self.residency.set(Role.ROLLOUT, on_device=False)
        except Exception as second:
            error.add_note(f"putting the rollout engine to sleep failed too: {second}")
