"""What cannot be asked of the moves of weights."""

from __future__ import annotations

from collections.abc import Iterator

from unirl.config.components import engine_capabilities
from unirl.config.problem import Problem
from unirl.config.schema import RunConfig


def in_shards(config: RunConfig) -> bool:
    return config.num_devices > 1 and config.backend.mesh != "no_shard"


def shared_base(config: RunConfig) -> Iterator[Problem]:
    """Two roles can use one copy of the frozen weights only where both have them in one layout."""
    if not config.rollout.share_base:
        return
    key, fix = "rollout.share_base", "Set it to false"
    if engine_capabilities(config).shares_train_weights:
        found = f"rollout.engine={config.rollout.engine} has no copy of its own"
        yield Problem(key, f"is true, but {found}. {fix}.")
    elif not engine_capabilities(config).shares_base:
        found = f"rollout.engine={config.rollout.engine} cannot sample with another's memory"
        yield Problem(key, f"is true, but {found}. {fix}, or rollout.engine=replica.")
    elif config.stack.lora is None:
        found = "with stack.lora=null all weights are trained and none are frozen"
        yield Problem(key, f"is true, but {found}. {fix}, or train an adapter: stack.lora={{}}.")
    elif in_shards(config):
        found = "the train stack's weights are in shards, the engine needs them whole"
        yield Problem(key, f"is true, but {found}. {fix}, or backend.mesh=no_shard.")


def save_from_host(config: RunConfig) -> Iterator[Problem]:
    if config.save_reads == "host" and in_shards(config):
        yield Problem(
            "save_reads",
            "is 'host', but weights in shards are gathered on the devices. Set save_reads=device, "
            "or backend.mesh=no_shard.",
        )


def overlap(config: RunConfig) -> Iterator[Problem]:
    if config.overlap_moves and config.device_budget_gib is None and config.device == "cpu":
        yield Problem(
            "overlap_moves",
            "is true, but with device=cpu and no device_budget_gib nothing says whether what "
            "leaves and what comes fit together. Set device_budget_gib, or overlap_moves=false.",
        )


def automatic(config: RunConfig) -> Iterator[Problem]:
    if config.residency == "auto" and engine_capabilities(config).shares_train_weights:
        yield Problem(
            "residency",
            f"is 'auto', but rollout.engine={config.rollout.engine} samples with the trained "
            "weights, so they never leave. Set residency=policy, or rollout.engine=replica.",
        )
