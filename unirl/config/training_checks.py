"""What can be wrong with groups, updates and windows."""

from __future__ import annotations

from collections.abc import Iterator

from unirl.config.components import algorithm_capabilities
from unirl.config.problem import Problem
from unirl.config.schema import RunConfig


def group_size(config: RunConfig) -> Iterator[Problem]:
    needs = algorithm_capabilities(config)
    if config.sampling.samples_per_prompt == 1 and (needs.needs_advantages or needs.needs_groups):
        found = (
            "advantages compare the samples of one prompt and would all be 0"
            if needs.needs_advantages
            else f"algorithm.path={config.algorithm.path} compares the samples of one prompt"
        )
        yield Problem(
            "sampling.samples_per_prompt",
            f"is 1, but {found}. Set it to 2 or more; 8 to 32 are usual.",
        )


def updates(config: RunConfig) -> Iterator[Problem]:
    updates = config.stack.num_updates_per_batch
    if updates > 1 and not algorithm_capabilities(config).supports_multi_update:
        yield Problem(
            "stack.num_updates_per_batch",
            f"is {updates}, but algorithm.path={config.algorithm.path} allows one update per "
            "batch. Set it to 1.",
        )


def accumulated(config: RunConfig) -> Iterator[Problem]:
    window = config.accumulate_rollouts
    if window == 1:
        return
    if config.stack.num_updates_per_batch > 1:
        yield Problem(
            "stack.num_updates_per_batch",
            f"is {config.stack.num_updates_per_batch}, but accumulate_rollouts={window} makes one "
            "update of several rollouts. Set stack.num_updates_per_batch=1 or "
            "accumulate_rollouts=1.",
        )
    if algorithm_capabilities(config).needs_ema_rollout:
        yield Problem(
            "accumulate_rollouts",
            f"is {window}, but algorithm.path={config.algorithm.path} samples with an EMA of the "
            "weights, which moves with every rollout. Set accumulate_rollouts=1.",
        )
    counts = {
        "eval_interval": config.eval_interval,
        "save_interval": config.save_interval,
        "num_rollouts": config.num_rollouts,
    }
    for key, count in counts.items():
        if count % window:
            below = count // window * window
            near = f"{below} or {below + window}" if below else f"{window}"
            yield Problem(
                key,
                f"is {count}, which is not a multiple of accumulate_rollouts={window}. "
                f"Set {key} to {near}.",
            )


def schedule(config: RunConfig) -> Iterator[Problem]:
    schedule = config.stack.scheduler
    if schedule.total_steps is not None and schedule.total_steps <= schedule.warmup_steps:
        yield Problem(
            "stack.scheduler.total_steps",
            f"is {schedule.total_steps}, not more than warmup_steps={schedule.warmup_steps}. "
            "Raise it or lower stack.scheduler.warmup_steps.",
        )
