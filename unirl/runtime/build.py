"""The composition root: the only place that turns a RunConfig into objects and connects them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unirl.algorithms.base import Algorithm
from unirl.config import catalog
from unirl.config.components import absent_packages, import_component, is_own, sync_name
from unirl.config.resources import resolve_path
from unirl.config.schema import RewardConfig, RunConfig, ScorerConfig
from unirl.core.errors import ConfigError, UnirlError
from unirl.core.types import PromptRecord
from unirl.data.prompts import load_prompts
from unirl.data.stream import PromptStream
from unirl.distributed.agreement import require_same_settings
from unirl.distributed.ranks import Ranks
from unirl.models.base import DiffusionModel
from unirl.residency.planner import ResidencyPlanner, RoleMoves
from unirl.residency.policy import ResidencyPolicy, Role
from unirl.residency.trace import TransitionLog
from unirl.reward.scorer import Scorer
from unirl.reward.service import RewardService, WeightedScorer
from unirl.rollout.engine import RolloutEngine
from unirl.runtime.training_model import build_model, build_training_model
from unirl.tracking.tracker import Tracker
from unirl.train.backend import TrainBackend
from unirl.train.stack import TrainStack
from unirl.trainer.checkpoints import Checkpoints
from unirl.trainer.clock import PhaseClock
from unirl.trainer.diffusion import DiffusionTrainer
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.phases import Phases
from unirl.trainer.requests import RequestFactory
from unirl.weight_sync.base import SharedWeights, WeightSync


@dataclass(frozen=True)
class Prompts:
    """Training and evaluation records."""

    train: tuple[PromptRecord, ...]
    evaluation: tuple[PromptRecord, ...]


@dataclass(frozen=True)
class Roles:
    """The three roles and the sync between two of them."""

    stack: TrainStack
    engine: RolloutEngine
    reward: RewardService
    sync: WeightSync


def build_trainer(
    config: RunConfig,
    prompts: Prompts,
    roles: Roles,
    checkpoints: Checkpoints,
    image_dir: Path,
    transitions: TransitionLog,
    tracker: Tracker,
    should_stop: Callable[[], bool],
    ranks: Ranks,
) -> DiffusionTrainer:
    """Wire the loop around loaded roles."""
    planner = build_planner(config, roles, transitions, ranks)
    require_same_settings({"residency plan": planner.plan}, ranks)
    phases = Phases(roles.engine, roles.reward, roles.sync, planner, PhaseClock(), ranks)
    requests = RequestFactory(config, roles.stack.model)
    return DiffusionTrainer(
        config,
        roles.stack,
        phases,
        PromptStream(prompts.train, config.batch_size, config.seed),
        requests,
        Evaluator(config, phases, requests, prompts.evaluation, image_dir, should_stop),
        checkpoints,
        tracker,
        transitions,
        should_stop,
    )


def load_all_prompts(config: RunConfig) -> Prompts:
    train = load_prompts(resolve_path(config.data.train), "data.train")
    if config.data.eval is None:
        return Prompts(train, train)
    return Prompts(train, load_prompts(resolve_path(config.data.eval), "data.eval"))


def build_roles(config: RunConfig, prompts: Prompts, ranks: Ranks) -> Roles:
    """Reward first: its complaints are the cheapest to find."""
    device = pick_device(config.device)
    reward = build_reward(config)
    reward.check_records(prompts.train, "data.train")
    if config.eval_interval > 0:
        reward.check_records(prompts.evaluation, "data.eval")
    engine_class = _resolve(config.rollout.engine, catalog.ENGINES)
    forward_batch_size = config.rollout.forward_batch_size
    sync = sync_name(config)
    if sync is None:
        model, backend = build_training_model(config, device, ranks, with_encoders=True)
        _check_prompts(model, prompts)
        stack = build_stack(config, model, backend, device, ranks)
        gathered = stack.gathered if config.rollout.unshard else nullcontext
        engine = engine_class(
            model, forward_batch_size, device, lambda: stack.weight_version, gathered
        )
        return Roles(stack, engine, reward, SharedWeights(stack))
    # The engine parks itself before the trainer comes, so that both never share the device.
    rollout_model = build_model(config, device, with_encoders=True)
    _check_prompts(rollout_model, prompts)
    engine = engine_class(rollout_model, forward_batch_size, device)
    model, backend = build_training_model(config, device, ranks, with_encoders=False)
    stack = build_stack(config, model, backend, device, ranks)
    sync_class = import_component(catalog.SYNCS[sync].path)
    return Roles(stack, engine, reward, sync_class(stack, engine, config.sync.verify))


def _check_prompts(model: DiffusionModel, prompts: Prompts) -> None:
    model.check_prompts([record.text for record in prompts.train], "data.train")
    model.check_prompts([record.text for record in prompts.evaluation], "data.eval")


def build_stack(
    config: RunConfig,
    model: DiffusionModel,
    backend: TrainBackend,
    device: torch.device,
    ranks: Ranks,
) -> TrainStack:
    algorithm: Algorithm[Any] = _resolve(config.algorithm.path, catalog.ALGORITHMS)(
        config.algorithm
    )
    windows = config.num_rollouts // config.accumulate_rollouts
    return TrainStack(
        model,
        backend,
        algorithm,
        config.stack,
        total_steps=windows * config.stack.num_updates_per_batch,
        latent_shape=model.latent_shape(config.sampling.height, config.sampling.width),
        seed=config.seed,
        device=device,
        ranks=ranks,
    )


def build_reward(config: RunConfig) -> RewardService:
    reward = config.reward or RewardConfig()
    missing = missing_judges(config.eval_rewards)
    asked = config.eval_rewards if config.eval_interval > 0 else {}
    judges = {name: judge for name, judge in asked.items() if name not in missing}
    return RewardService(
        {
            name: WeightedScorer(_build_scorer(scorer, f"reward.scorers.{name}"), scorer.weight)
            for name, scorer in reward.scorers.items()
        },
        {name: _build_scorer(judge, f"eval_rewards.{name}") for name, judge in judges.items()},
        reward,
    )


def missing_judges(judges: dict[str, ScorerConfig]) -> dict[str, list[str]]:
    """Optional judges that cannot run, and the packages they lack."""
    lacking = {name: absent_packages(judge.path) for name, judge in judges.items()}
    return {
        name: packages for name, packages in lacking.items() if judges[name].optional and packages
    }


def _build_scorer(config: ScorerConfig, key: str) -> Scorer:
    """Raises ConfigError when the user's class or its args fail."""
    scorer_class = _resolve(config.path, catalog.SCORERS)
    if not issubclass(scorer_class, Scorer):
        raise ConfigError(
            f"{key}.path={config.path}: {scorer_class.__name__} must derive from "
            "unirl.reward.scorer.Scorer"
        )
    try:
        return scorer_class(**config.args)
    except UnirlError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key}: building {config.path} with args {config.args} failed: "
            f"{type(error).__name__}: {error}. Correct {key}.args."
        ) from error


def build_planner(
    config: RunConfig, roles: Roles, transitions: TransitionLog, ranks: Ranks
) -> ResidencyPlanner:
    """Tracks the roles that share the slab: train unless it samples by itself, rollout, reward."""
    moves = {Role.ROLLOUT: RoleMoves(roles.engine.wake_up, roles.engine.sleep)}
    if not roles.engine.capabilities.shares_train_weights:
        moves[Role.TRAIN] = RoleMoves(roles.stack.onload, roles.stack.offload)
    moves[Role.REWARD] = RoleMoves(roles.reward.onload, roles.reward.offload)
    policy = ResidencyPolicy(config.train_resident, config.rollout_resident, config.reward_resident)
    return ResidencyPlanner(policy, moves, transitions.record, ranks.barrier)


def pick_device(name: str) -> torch.device:
    """`cuda` is this rank's GPU. Raises ConfigError when the device is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(0, device=torch.device(name)).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"device={name} cannot be used: {reason}. Set device=auto, which takes "
            f"{'cuda' if torch.cuda.is_available() else 'the CPU'} here."
        ) from error
    return device


def _resolve(name: str, table: dict[str, Any]) -> type[Any]:
    return import_component(name if is_own(name) else table[name].path)
