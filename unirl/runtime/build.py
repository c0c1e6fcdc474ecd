"""The composition root: the only place that turns a RunConfig into prompts and roles."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unirl.algorithms.making import make_algorithm
from unirl.config import catalog
from unirl.config.components import (
    absent_packages,
    algorithm_capabilities,
    engine_capabilities,
    import_component,
    is_own,
    sync_name,
)
from unirl.config.resources import resolve_path
from unirl.config.schema import RewardConfig, RunConfig, ScorerConfig
from unirl.config.suites import AskedSuite, asked_suites
from unirl.core.errors import ConfigError, UnirlError
from unirl.core.types import PromptRecord, PromptSuite
from unirl.data.prompts import load_prompts
from unirl.data.recorded import require_recorded, require_unrecorded
from unirl.distributed.ranks import Ranks
from unirl.memory.hostmem import GIB, HostArena, HostLimit, host_limit
from unirl.memory.sharing import share_base
from unirl.models.base import DiffusionModel
from unirl.models.condition_images import require_images
from unirl.reward.scorer import Scorer
from unirl.reward.service import RewardService, WeightedScorer
from unirl.rollout.engine import RolloutEngine
from unirl.runtime.training_model import (
    build_model,
    build_training_model,
    encode_before,
    require_makeable,
)
from unirl.train.backend import TrainBackend
from unirl.train.stack import TrainStack
from unirl.train.teachers import read_teacher
from unirl.trainer.requests import training_params
from unirl.weight_sync.base import SharedWeights, WeightSync

logger = logging.getLogger("unirl.build")


@dataclass(frozen=True)
class Prompts:
    """Training records, and what is evaluated."""

    train: tuple[PromptRecord, ...]
    suites: tuple[PromptSuite, ...]
    """data.eval's first; none with eval_interval=0."""

    @property
    def suite_sizes(self) -> tuple[int, ...]:
        """Prompts of each suite."""
        return tuple(len(suite) for suite in self.suites)


@dataclass(frozen=True)
class Roles:
    """The three roles and the sync between two of them."""

    stack: TrainStack
    engine: RolloutEngine
    reward: RewardService
    sync: WeightSync


def load_all_prompts(config: RunConfig) -> Prompts:
    train = load_prompts(resolve_path(config.data.train), "data.train")
    make_algorithm(config.algorithm).check_prompts(train, "data.train")
    _require_images(config, train, "data.train")
    if engine_capabilities(config).returns_recorded:
        require_recorded(train, config.sampling.samples_per_prompt, "data.train")
    return Prompts(train, tuple(load_suite(config, asked) for asked in asked_suites(config)))


def load_suite(config: RunConfig, asked: AskedSuite) -> PromptSuite:
    """Prompts that are evaluated; raises DataError where the model cannot take them."""
    records = load_prompts(resolve_path(asked.path), asked.key)
    _require_images(config, records, asked.key)
    if engine_capabilities(config).returns_recorded:
        require_unrecorded(records, asked.key)
    return PromptSuite(asked.name, records[: asked.num_prompts], asked.samples_per_prompt)


def _require_images(config: RunConfig, records: tuple[PromptRecord, ...], key: str) -> None:
    if not is_own(config.model.family):
        require_images(records, catalog.MODELS[config.model.family].num_images, key)


def build_host(config: RunConfig) -> HostArena:
    """Where parked weights go."""
    return HostArena(_host_limit(config), pin=pick_device(config.device).type == "cuda")


def build_reward_role(config: RunConfig, prompts: Prompts, host: HostArena) -> RewardService:
    """The scorers, checked against the prompts; first, as its complaints are the cheapest."""
    reward = build_reward(config, host)
    reward.check_records(prompts.train, "data.train")
    for suite, asked in zip(prompts.suites, asked_suites(config), strict=True):
        reward.check_records(suite.records, asked.key, suite.name)
    return reward


def build_roles(
    config: RunConfig, prompts: Prompts, reward: RewardService, host: HostArena, ranks: Ranks
) -> Roles:
    """The rollout engine and the train stack, with their weights, beside the reward."""
    require_makeable(config)
    device = pick_device(config.device)
    if config.model.encodings is not None:
        evaluated = [record for suite in prompts.suites for record in suite.records]
        records = (*prompts.train, *evaluated)
        written = ranks.on_main(lambda: encode_before(config, records, device))
        logger.info("wrote %d encodings into %s", written, config.model.encodings)
    sync = sync_name(config)
    if sync is None:
        return _with_one_model(config, prompts, reward, device, ranks, host)
    engine_class = _resolve(config.rollout.engine, catalog.ENGINES)
    forward_batch_size = config.rollout.forward_batch_size
    # Shared weights are not read onto the device a second time.
    at_first = torch.device("cpu") if config.rollout.share_base else device
    rollout_model = build_model(config, at_first, with_encoders=True)
    _check_prompts(rollout_model, prompts, config)
    if config.rollout.share_base:
        stack = _build_second_stack(config, reward, device, ranks, host)
        share_base(rollout_model.network, stack.model.network)
        for module in [rollout_model.network, *rollout_model.frozen_modules.values()]:
            module.to(device)
        base = next(part for part in stack.parts if part.name == "train.base")
        engine = engine_class(rollout_model, forward_batch_size, device, host, base)
    else:
        # The engine parks itself before the trainer comes, so that both never share the device.
        engine = engine_class(rollout_model, forward_batch_size, device, host, None)
        stack = _build_second_stack(config, reward, device, ranks, host)
    sync_class = import_component(catalog.SYNCS[sync].path)
    return Roles(stack, engine, reward, sync_class(stack.weights, engine, config.sync.verify))


def _host_limit(config: RunConfig) -> HostLimit:
    """For this process: the key, or its share of what the machine or container has."""
    if config.host_budget_gib is not None:
        return HostLimit(int(config.host_budget_gib * GIB), "key host_budget_gib", is_chosen=True)
    return host_limit().share(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _with_one_model(
    config: RunConfig,
    prompts: Prompts,
    reward: RewardService,
    device: torch.device,
    ranks: Ranks,
    host: HostArena,
) -> Roles:
    """The engine samples with the trained weights themselves."""
    engine_class = _resolve(config.rollout.engine, catalog.ENGINES)
    model, backend = build_training_model(config, device, ranks, with_encoders=True)
    _check_prompts(model, prompts, config)
    stack = build_stack(config, model, backend, reward, device, ranks, host)
    engine = engine_class(
        model,
        config.rollout.forward_batch_size,
        device,
        lambda: stack.weight_version,
        lambda: stack.sampling(unshard=config.rollout.unshard),
    )
    return Roles(stack, engine, reward, SharedWeights(stack))


def _build_second_stack(
    config: RunConfig, reward: RewardService, device: torch.device, ranks: Ranks, host: HostArena
) -> TrainStack:
    """The train stack beside an engine with encoders of its own; one that sends gradients through
    the decoder has its own too."""
    with_encoders = algorithm_capabilities(config).differentiates_reward
    model, backend = build_training_model(config, device, ranks, with_encoders)
    return build_stack(config, model, backend, reward, device, ranks, host)


def _check_prompts(model: DiffusionModel, prompts: Prompts, config: RunConfig) -> None:
    model.check_prompts(prompts.train, "data.train")
    for suite, asked in zip(prompts.suites, asked_suites(config), strict=True):
        model.check_prompts(suite.records, asked.key)


def build_stack(
    config: RunConfig,
    model: DiffusionModel,
    backend: TrainBackend,
    reward: RewardService,
    device: torch.device,
    ranks: Ranks,
    host: HostArena,
) -> TrainStack:
    algorithm = make_algorithm(config.algorithm, reward.differentiable)
    if algorithm.capabilities.differentiates_reward:
        reward.require_differentiable()
    windows = config.num_rollouts // config.accumulate_rollouts
    return TrainStack(
        model,
        backend,
        algorithm,
        config.stack,
        total_steps=windows * config.stack.num_updates_per_batch,
        sampling=training_params(config),
        seed=config.seed,
        device=device,
        ranks=ranks,
        host=host,
        teachers={name: read_teacher(file) for name, file in algorithm.teachers().items()},
        moments_on_demand=not config.optimizer_resident,
    )


def build_reward(config: RunConfig, host: HostArena) -> RewardService:
    reward = config.reward or RewardConfig()
    missing = missing_judges(config.eval_rewards)
    asked = config.eval_rewards if config.eval_interval > 0 else {}
    judges = {name: judge for name, judge in asked.items() if name not in missing}
    suites = config.eval_suites if config.eval_interval > 0 else {}
    return RewardService(
        _weighted(reward.scorers, "reward.scorers"),
        {name: _build_scorer(judge, f"eval_rewards.{name}") for name, judge in judges.items()},
        reward,
        host,
        {
            name: _weighted(suite.scorers, f"eval_suites.{name}.scorers")
            for name, suite in suites.items()
        },
    )


def _weighted(scorers: Mapping[str, ScorerConfig], key: str) -> dict[str, WeightedScorer]:
    return {
        name: WeightedScorer(_build_scorer(scorer, f"{key}.{name}"), scorer.weight)
        for name, scorer in scorers.items()
    }


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
