"""Keys that the values of others leave unread: what is set must count.

A key may stay behind where a number turns its thing off (sampling.eta=0, kl_coefficient=0,
save_interval=0): such a run is usually compared with one that has the thing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from unirl.config.components import algorithm_capabilities, sync_name
from unirl.config.problem import Problem
from unirl.config.schema import RunConfig
from unirl.config.step_selection import earliest_last_step, selection_problems


@dataclass(frozen=True)
class ReadWith:
    """A key that counts with some values of another one only."""

    key: str
    choice: str
    """Dotted key of the other one."""
    values: tuple[str, ...]
    """Of the other one; the first is named as a way out."""


STRATEGY = "sampling.sde_steps.strategy"
STRATEGIES_WITH_KEY = {
    "range": ("all", "random", "window", "progressive", "stratified"),
    "steps": ("list",),
    "num_steps": ("random", "window", "progressive"),
    "rollouts_per_window": ("progressive",),
    "window_stride": ("progressive",),
    "window_pace": ("progressive",),
    "min_rollouts_per_window": ("progressive",),
    "roll_back": ("progressive",),
}
"""Key of sampling.sde_steps -> strategies that read it."""

CHOICES = (
    *(
        ReadWith(f"sampling.sde_steps.{name}", STRATEGY, strategies)
        for name, strategies in STRATEGIES_WITH_KEY.items()
    ),
    ReadWith("stack.scheduler.total_steps", "stack.scheduler.type", ("linear", "cosine")),
    ReadWith("reward.num_retries", "reward.on_failure", ("retry",)),
    ReadWith("reward.retry_seconds", "reward.on_failure", ("retry",)),
    ReadWith("algorithm.ema_decay", "algorithm.reference", ("ema",)),
    ReadWith("train_fraction", "layout", ("separate",)),
    ReadWith(
        "sampling.sde_steps.min_rollouts_per_window",
        "sampling.sde_steps.window_pace",
        ("decay", "exp_decay"),
    ),
    ReadWith("backend.prefetch", "backend.mesh", ("full", "hybrid")),
    ReadWith("backend.defer_reduce", "backend.mesh", ("full", "hybrid")),
)
"""A key that several choices leave unread is told with the first of them."""


def unread_choices(config: RunConfig) -> Iterator[Problem]:
    """Keys that differ from their defaults and that the named choice beside them does not read."""
    told: set[str] = set()
    for rule in CHOICES:
        if rule.key in told or not _is_there(config, rule.key):
            continue
        value, default = attrgetter(rule.key)(config), _default(rule.key)
        chosen = attrgetter(rule.choice)(config)
        if value != default and chosen not in rule.values:
            told.add(rule.key)
            yield Problem(
                rule.key,
                f"is {json.dumps(value)}, but {rule.choice}={chosen} does not read it; "
                f"{' and '.join(rule.values)} would. Set {rule.key}={json.dumps(default)}, or "
                f"{rule.choice}={rule.values[0]}.",
            )


def _is_there(config: RunConfig, key: str) -> bool:
    """The block may be null; a key that the algorithm never reads is told of elsewhere."""
    block, _, name = key.rpartition(".")
    if block == "algorithm":
        return name in algorithm_capabilities(config).options
    return block != "reward" or config.reward is not None


def _default(key: str) -> Any:
    return attrgetter(key)(RunConfig())


SYNC_KEYS = ("weight_sync_interval", "sync.verify")


def unread_sync(config: RunConfig) -> Iterator[Problem]:
    """Keys of an engine with weights of its own, where the trained ones sample."""
    if sync_name(config) is not None:
        return
    for key in SYNC_KEYS:
        value, default = attrgetter(key)(config), _default(key)
        if value != default:
            yield Problem(
                key,
                f"is {json.dumps(value)}, but rollout.engine={config.rollout.engine} samples with "
                "the train stack's own weights: nothing is synced. Set "
                f"{key}={json.dumps(default)}, or rollout.engine=replica.",
            )


def unread_judge_weights(config: RunConfig) -> Iterator[Problem]:
    """Judges are shown one by one and never added up."""
    for name, judge in config.eval_rewards.items():
        if judge.weight != 1:
            yield Problem(
                f"eval_rewards.{name}.weight",
                f"is {judge.weight:g}, but judges are not added up: a weight counts in "
                "reward.scorers and eval_suites. Remove the key.",
            )


def unread_kernel(config: RunConfig) -> Iterator[Problem]:
    """Evaluation without noise has no stochastic steps."""
    kernel = config.eval_sampling.kernel
    if kernel is not None and config.eval_eta == 0:
        yield Problem(
            "eval_sampling.kernel",
            f"is {kernel}, the transition of stochastic steps, but eval_eta=0 makes none. Set "
            "eval_sampling.kernel=null, or eval_eta above 0.",
        )


def unread_starts(config: RunConfig) -> Iterator[Problem]:
    """Two keys say which samples start from one noise, and only one of them can be followed."""
    sampling = config.sampling
    per_start, group = sampling.samples_per_start, sampling.samples_per_prompt
    if sampling.init_same_noise and per_start not in (None, group):
        yield Problem(
            "sampling.init_same_noise",
            f"is true, which starts all {group} samples of a prompt from one noise, but "
            f"sampling.samples_per_start={per_start} asks for {per_start}. Set "
            "sampling.init_same_noise=false, or sampling.samples_per_start=null.",
        )


def unread_thinning(config: RunConfig) -> Iterator[Problem]:
    """thin_after needs two steps or more behind the last one that training looks at."""
    sampling = config.sampling
    if sampling.thin_after == 1 or any(
        selection_problems(sampling.sde_steps, sampling.num_inference_steps)
    ):
        return
    total, last = sampling.num_inference_steps, _last_needed_step(config)
    if last > total - 3:
        yield Problem(
            "sampling.thin_after",
            f"is {sampling.thin_after}, but in every rollout training looks at step {last} or "
            f"later, and of {total} steps (0 to {total - 1}) fewer than two come after it: none "
            "could be left out. Set sampling.thin_after=1, or let training look at earlier steps.",
        )


def _last_needed_step(config: RunConfig) -> int:
    """In the rollout in which it is the earliest; -1 where training looks at images alone."""
    algorithm, sampling = config.algorithm, config.sampling
    total = sampling.num_inference_steps
    last = -1
    if sampling.eta > 0:
        num_starts = sampling.samples_per_prompt // sampling.num_samples_per_start
        last = earliest_last_step(sampling.sde_steps, total, num_starts)
    if algorithm.path == "draft":
        return total - 1
    if algorithm.path == "refl":
        return max(last, algorithm.start_steps(total).start)
    return last
