"""What cannot be asked of the train stack, the rollout engine and the sync between them."""

from __future__ import annotations

from collections.abc import Iterator

from unirl.config.components import (
    algorithm_capabilities,
    engine_capabilities,
    sync_capabilities,
)
from unirl.config.problem import Problem
from unirl.config.schema import RunConfig


def old_log_prob(config: RunConfig) -> Iterator[Problem]:
    asked = config.algorithm.old_log_prob == "rollout"
    if asked and not engine_capabilities(config).emits_log_probs:
        yield Problem(
            "algorithm.old_log_prob",
            f"is 'rollout', but rollout.engine={config.rollout.engine} returns no log-probs. "
            "Set algorithm.old_log_prob=replay.",
        )


def adapter_lost_on_sleep(config: RunConfig) -> Iterator[Problem]:
    sync = sync_capabilities(config)
    if (
        sync is not None
        and sync.adapters_only
        and not engine_capabilities(config).keeps_adapter_on_sleep
        and config.weight_sync_interval > 1
        and not config.resident["rollout"]
    ):
        yield Problem(
            "weight_sync_interval",
            f"is {config.weight_sync_interval}, but rollout.engine={config.rollout.engine} loses "
            "its adapter when it is parked, after every rollout. Set weight_sync_interval=1 or "
            "rollout_resident=true.",
        )


def train_parking(config: RunConfig) -> Iterator[Problem]:
    """The first reason why the train stack cannot be parked; later ones would mislead."""
    if config.train_resident is not False:
        return
    key, fix = "train_resident", "Set train_resident=true"
    sync = sync_capabilities(config)
    if config.layout == "separate":
        found = "layout=separate gives the train stack devices of its own: nothing to park it for"
        yield Problem(key, f"is false, but {found}. {fix}.")
    elif sync is None:
        found = f"rollout.engine={config.rollout.engine} samples with the train stack's own weights"
        yield Problem(
            key, f"is false, but {found}: nothing to park. {fix}, or rollout.engine=replica."
        )
    elif not sync.staged:
        found = "the weight sync of full weights reads the trainer while it loads the engine"
        yield Problem(key, f"is false, but {found}. {fix}, or train an adapter: stack.lora={{}}.")
    elif algorithm_capabilities(config).needs_ema_rollout:
        found = f"algorithm.path={config.algorithm.path} samples with an EMA the train stack holds"
        yield Problem(key, f"is false, but {found}. {fix}.")


def trainside_separate(config: RunConfig) -> Iterator[Problem]:
    if config.layout == "separate" and engine_capabilities(config).shares_train_weights:
        yield Problem(
            "layout",
            f"is 'separate', but rollout.engine={config.rollout.engine} samples with the train "
            "stack's own weights, on its devices. Set layout=colocate.",
        )


def fractions(config: RunConfig) -> Iterator[Problem]:
    train, reward = config.train_fraction, config.reward_fraction
    if not 0 <= reward < 1:
        yield Problem("reward_fraction", f"is {reward:g}; it must be at least 0 and below 1.")
    elif config.layout == "separate" and not 0 < train < 1:
        yield Problem("train_fraction", f"is {train:g}; it must lie between 0 and 1.")
    elif config.layout == "separate" and train + reward >= 1:
        yield Problem(
            "train_fraction",
            f"{train:g} + reward_fraction {reward:g} = {train + reward:g} leaves no devices for "
            "rollouts. Lower one, so that the sum is below 1.",
        )


def available(config: RunConfig) -> Iterator[Problem]:
    only = "not available in this version, where all roles share each device."
    if config.layout == "separate":
        yield Problem("layout", f"is 'separate': {only} Set layout=colocate.")
    if config.reward_fraction > 0:
        yield Problem(
            "reward_fraction", f"is {config.reward_fraction:g}: {only} Set reward_fraction=0."
        )
