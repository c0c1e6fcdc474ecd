"""Keys that the chosen algorithm or schedule would ignore: what is set must count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unirl.config import catalog
from unirl.config.components import algorithm_capabilities, is_own
from unirl.config.problem import Problem
from unirl.config.schema import AlgorithmConfig, RunConfig

ALWAYS_READ = ("path", "args", "adv_clip_max")


def ignored_options(config: RunConfig) -> Iterator[Problem]:
    """Keys of the algorithm block that differ from their defaults and that nobody reads."""
    algorithm = config.algorithm
    if is_own(algorithm.path):
        return  # the user's own class reads what it likes
    read = algorithm_capabilities(config).options
    defaults = AlgorithmConfig()
    for name, value in algorithm:
        if name in (*read, *ALWAYS_READ) or value == getattr(defaults, name):
            continue
        yield Problem(
            f"algorithm.{name}",
            f"is {value!r}, but algorithm.path={algorithm.path} does not read it. It reads: "
            f"{', '.join(read)}. Remove the key.",
        )
    if algorithm.args:
        yield Problem(
            "algorithm.args",
            f"is {algorithm.args}, but only an algorithm of your own has args; "
            f"algorithm.path={algorithm.path} is built in. Remove the key.",
        )


ADVANTAGE_KEYS = (
    "adv_use_global_std",
    "adv_per_component",
    "adv_ddof",
    "adv_epsilon",
    "adv_group",
    "adv_trim",
)


def ignored_advantages(config: RunConfig) -> Iterator[Problem]:
    """Keys of advantages that differ from their defaults where nothing is trained on them."""
    path = config.algorithm.path
    if is_own(path) or algorithm_capabilities(config).needs_advantages:
        return
    asked = {name: (getattr(config, name), _default(name)) for name in ADVANTAGE_KEYS}
    clip_max = AlgorithmConfig().adv_clip_max
    asked["algorithm.adv_clip_max"] = (config.algorithm.adv_clip_max, clip_max)
    for name, (value, default) in asked.items():
        if value != default:
            yield Problem(
                name,
                f"is {value!r}, but algorithm.path={path} does not train on advantages. "
                f"Set {name}={str(default).lower()}.",
            )


def _default(name: str) -> Any:
    return RunConfig.model_fields[name].default


def advantages(config: RunConfig) -> Iterator[Problem]:
    """Groups that are too small for what is asked of them."""
    group = config.sampling.samples_per_prompt
    if config.adv_best_of is not None and not 2 <= config.adv_best_of <= group:
        yield Problem(
            "adv_best_of",
            f"is {config.adv_best_of}; of sampling.samples_per_prompt={group} samples at least 2 "
            f"and at most {group} can be trained on.",
        )
    siblings = config.sampling.num_samples_per_start
    if config.adv_group == "start" and siblings < 2:
        yield Problem(
            "adv_group",
            "is 'start', but each sample starts from a noise of its own and would have nobody to "
            "be compared with. Set sampling.samples_per_start or sampling.init_same_noise=true.",
        )


def schedules(config: RunConfig) -> Iterator[Problem]:
    """A shift is applied to a schedule that is asked for, never on top of the model's own; and a
    window has one kernel."""
    sampling = config.sampling
    if sampling.kernel == "flash" and sampling.thin_after > 1 and config.accumulate_rollouts > 1:
        yield Problem(
            "sampling.thin_after",
            f"is {sampling.thin_after}, but the flash kernel's noise depends on the smallest level "
            "that is left, which may differ between the rollouts of a window. Set it to 1, or "
            "accumulate_rollouts=1.",
        )
    kind, overlay = sampling.sigma_schedule, config.eval_sampling
    asked = {
        "sampling.shift": (config.sampling.shift, kind),
        "eval_sampling.shift": (overlay.shift, overlay.sigma_schedule or kind),
    }
    for key, (shift, schedule) in asked.items():
        if shift is not None and schedule == "model":
            block = key.removesuffix(".shift")
            yield Problem(
                key,
                f"is {shift:g}, but {block}.sigma_schedule=model is the schedule the model is "
                f"deployed with, its own shift included. Set {block}.sigma_schedule=linear.",
            )


def untrained_levels(config: RunConfig) -> Iterator[Problem]:
    """A schedule from level 1 for a network that knows the levels of its own timesteps only."""
    family = config.model.family
    if is_own(family) or not catalog.MODELS[family].trained_levels:
        return
    asked = {
        "sampling.sigma_schedule": config.sampling.sigma_schedule,
        "eval_sampling.sigma_schedule": config.eval_sampling.sigma_schedule,
    }
    for key, schedule in asked.items():
        if schedule not in (None, "model"):
            yield Problem(
                key,
                f"is {schedule}, which begins at level 1, but model.family={family} was trained "
                f"on the levels of its own timesteps, all below. Set {key}=model.",
            )
