"""What can be wrong with scorers, judges and a missing reward."""

from __future__ import annotations

import re
from collections.abc import Iterator

from unirl.config.components import absent_packages, algorithm_capabilities
from unirl.config.problem import Problem
from unirl.config.schema import RunConfig, ScorerConfig


def all_scorers(config: RunConfig) -> list[tuple[str, ScorerConfig]]:
    trained = {} if config.reward is None else config.reward.scorers
    return [
        *((f"reward.scorers.{name}", scorer) for name, scorer in trained.items()),
        *((f"eval_rewards.{name}", scorer) for name, scorer in config.eval_rewards.items()),
    ]


def scorer_packages(config: RunConfig) -> Iterator[Problem]:
    for key, scorer in all_scorers(config):
        absent = absent_packages(scorer.path)
        if absent and not scorer.optional:
            yield Problem(
                f"{key}.path",
                f"is {scorer.path!r}, which needs {' and '.join(absent)}: not installed. "
                f"Install it, or remove the scorer: ~{key}",
            )


def scorer_names(config: RunConfig) -> Iterator[Problem]:
    for key, _ in all_scorers(config):
        block, _, name = key.rpartition(".")
        if not re.fullmatch(r"\w+", name):
            yield Problem(key, f"{name!r} becomes part of metric names: use letters, digits and _.")
        if block == "eval_rewards" and name == "reward":
            yield Problem(key, "is taken by the total reward. Give the judge another name.")


def trained_scorers(config: RunConfig) -> Iterator[Problem]:
    scorers = {} if config.reward is None else config.reward.scorers
    for name, scorer in scorers.items():
        if scorer.optional:
            yield Problem(
                f"reward.scorers.{name}.optional",
                "is true, but the reward that is trained on must be the same everywhere; only "
                "eval_rewards may be optional. Set it to false.",
            )
    if scorers and all(scorer.weight == 0 for scorer in scorers.values()):
        names = " and ".join(f"reward.scorers.{name}.weight" for name in scorers)
        yield Problem(
            "reward.scorers", f"has only weights of 0, so nothing is learnt: set {names}."
        )


def reward_present(config: RunConfig) -> Iterator[Problem]:
    if config.reward is not None and config.reward.scorers:
        return
    found = "is null" if config.reward is None else "has no scorers"
    if algorithm_capabilities(config).needs_advantages:
        yield Problem(
            "reward",
            f"{found}, but algorithm.path={config.algorithm.path} needs advantages and these need "
            "a reward. Choose a config group, e.g. reward=ocr_color, or set reward.scorers.",
        )
    elif config.eval_interval > 0:
        yield Problem(
            "eval_interval",
            f"is {config.eval_interval}, but reward {found}, so there is nothing to evaluate. "
            "Set eval_interval=0 or reward.scorers.",
        )
    if config.reward_fraction > 0:
        yield Problem(
            "reward_fraction",
            f"is {config.reward_fraction}, but reward {found}. Set reward_fraction=0.",
        )
