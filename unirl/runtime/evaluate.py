"""Evaluates a checkpoint outside its run, as the run's own evaluations do it.

In goes a configuration and a checkpoint, or none for the model that a run begins with. Out come
the metrics, and a folder like a run's: config.yaml, metrics.jsonl, evaluations, images. With the
same settings the numbers are those that the run logged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from unirl.algorithms.making import make_algorithm
from unirl.checkpoint.state import read_trainer_state
from unirl.config.schema import RunConfig
from unirl.config.suites import asked_suites
from unirl.core.errors import ConfigError
from unirl.core.types import PromptSuite, RolloutRequest
from unirl.distributed.agreement import require_visible
from unirl.distributed.ranks import Ranks
from unirl.models.base import DiffusionModel
from unirl.residency.planner import ResidencyPlanner
from unirl.residency.policy import ResidencyPolicy, Role
from unirl.reward.service import RewardService
from unirl.rollout.trainside import TrainsideEngine
from unirl.runtime.build import build_host, build_reward, load_suite
from unirl.runtime.export import require_empty
from unirl.runtime.run_directory import write_config
from unirl.runtime.trained import put_weights, take_own_device, untrained_model
from unirl.tracking.activity import Activity, Count
from unirl.tracking.intervals import Interval, changes_between
from unirl.tracking.jsonl import JsonlSink
from unirl.tracking.running import Running
from unirl.tracking.tracker import Row, Tracker
from unirl.trainer.archive import EvaluationArchive
from unirl.trainer.clock import NoMeter, PhaseClock
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.phases import Phases
from unirl.trainer.requests import RequestFactory
from unirl.weight_sync.base import SharedWeights


@dataclass(frozen=True)
class Assessment:
    """What an evaluation outside a run found."""

    num_prompts: Mapping[str, int]
    """Of each suite."""
    metrics: Mapping[str, float]
    base: Mapping[str, float]
    """Of the untrained model; empty where it was not asked for."""
    changes: Mapping[str, Interval]
    """From the untrained model to the trained one, prompt by prompt."""


def assess(
    config: RunConfig,
    checkpoint: Path | None,
    folder: Path,
    ranks: Ranks,
    *,
    shadow: str | None,
    with_base: bool,
) -> Assessment:
    """Evaluate the checkpoint's weights, or the untrained model where there is none.

    The folder must be new or empty. Its steps are the rollouts that the checkpoint has done, and 0
    for the untrained model. config: with eval_interval above 0, or no suite is asked for. On
    several ranks each has a whole model and samples its part of the prompts; rank 0 alone reads
    prompts and writes into its folder. Raises ConfigError where nothing scores.
    """
    ranks.on_main(lambda: require_empty(folder))
    if not config.reward or not config.reward.scorers:
        raise ConfigError("reward has no scorers, so there is nothing to evaluate. Give --scorer.")
    if checkpoint is not None:
        require_visible(checkpoint, "but each rank reads it. Copy it there.", ranks)
    device = take_own_device(config, ranks)
    activity = Activity(config.logging.console if ranks.is_main else "quiet")
    step = 0 if checkpoint is None else read_trainer_state(checkpoint).rollouts_done
    suites = ranks.on_main(
        lambda: tuple(load_suite(config, suite) for suite in asked_suites(config))
    )
    num_prompts = {suite.name: len(suite) for suite in suites}
    with activity.doing(f"loading {config.model.path}"):
        model = ranks.together(lambda: untrained_model(config, device))
    with activity.doing("loading what scores"):
        reward = ranks.together(lambda: _reward(config, model, suites))
    evaluations = _Evaluations(config, model, suites, reward, device, folder, activity, ranks)
    ranks.on_main(lambda: write_config(config, folder / "config.yaml"))
    base: Mapping[str, float] = {}
    sinks = [JsonlSink(folder / "metrics.jsonl")] if ranks.is_main else []
    with Tracker(sinks) as tracker:
        if checkpoint is None or with_base:
            base = evaluations.run("untrained model", 0, tracker)
        if checkpoint is None:
            return Assessment(num_prompts, base, {}, {})
        ranks.together(lambda: put_weights(model, config, checkpoint, shadow))
        metrics = evaluations.run(checkpoint.name, step, tracker)
    changes = ranks.on_main(lambda: changes_between(folder, 0, step)) if with_base else {}
    return Assessment(num_prompts, metrics, base, changes)


def _reward(
    config: RunConfig, model: DiffusionModel, suites: Sequence[PromptSuite]
) -> RewardService:
    """What scores, once it and the model have seen that they can take the prompts."""
    reward = build_reward(config, build_host(config))
    for suite, asked in zip(suites, asked_suites(config), strict=True):
        reward.check_records(suite.records, asked.key, suite.name)
        model.check_prompts(suite.records, asked.key)
    return reward


class _Evaluations:
    """Evaluates the model as it is, and shows how far that is."""

    def __init__(
        self,
        config: RunConfig,
        model: DiffusionModel,
        suites: Sequence[PromptSuite],
        reward: RewardService,
        device: torch.device,
        folder: Path,
        activity: Activity,
        ranks: Ranks,
    ) -> None:
        self._total = sum(map(len, suites))
        self._activity = activity
        self._ranks = ranks
        self._running = Running()
        self._count = Count(self._total, lambda num_done: None)
        engine = TrainsideEngine(
            model,
            config.rollout.forward_batch_size,
            device,
            lambda: 0,
            nullcontext,
            self._note_sampled,
        )
        residency = ResidencyPlanner(
            ResidencyPolicy.of(config),
            {Role.ROLLOUT: engine.parts, Role.REWARD: reward.parts},
            lambda transition: None,
            ranks.barrier,
        )
        clock = PhaseClock(NoMeter(), running=self._running)
        phases = Phases(engine, reward, SharedWeights(_Untrained()), residency, clock, ranks)
        requests = RequestFactory(config, model, make_algorithm(config.algorithm))
        archive = EvaluationArchive(folder, config)
        self._evaluator = Evaluator(config, phases, requests, suites, archive, lambda: False)

    def run(self, what: str, step: int, tracker: Tracker) -> Mapping[str, float]:
        """Metrics of an evaluation that is logged at `step`."""
        counting = self._activity.counting(what, self._total, "prompts", self._running)
        with counting as self._count:
            found = self._evaluator.run(step, sync_weights=False, note_progress=self._count.reach)
        assert found is not None, "nobody asks it to stop"
        tracker.log(Row("eval", step, 0, found.metrics))
        return found.metrics

    def _note_sampled(self, request: RolloutRequest, num_samples: float) -> None:
        """By this rank; the others are about as far."""
        num_prompts = num_samples / request.samples_per_prompt
        self._count.within(num_prompts * self._ranks.world_size)


class _Untrained:
    """No step is taken, so there is one version."""

    weight_version = 0
