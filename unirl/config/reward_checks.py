"""What can be wrong with scorers, judges and a missing reward."""

from __future__ import annotations

import re
from collections.abc import Iterator

from unirl.config.components import absent_packages, algorithm_capabilities
from unirl.config.problem import Problem
from unirl.config.schema import RunConfig, ScorerConfig
from unirl.config.suites import watched_scores
from unirl.core.types import MAIN_SUITE


def all_scorers(config: RunConfig) -> list[tuple[str, ScorerConfig]]:
    trained = {} if config.reward is None else config.reward.scorers
    blocks = {"reward.scorers": trained, "eval_rewards": config.eval_rewards}
    for suite, asked in config.eval_suites.items():
        blocks[f"eval_suites.{suite}.scorers"] = asked.scorers
    return [
        (f"{block}.{name}", scorer)
        for block, scorers in blocks.items()
        for name, scorer in scorers.items()
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
        if name == "reward":
            yield Problem(key, "is taken by the total reward. Give the scorer another name.")
        if block == "eval_rewards" and config.reward and name in config.reward.scorers:
            yield Problem(
                key, f"is the name of reward.scorers.{name} too. Give the judge another name."
            )


def evaluation_suites(config: RunConfig) -> Iterator[Problem]:
    for name, suite in config.eval_suites.items():
        key = f"eval_suites.{name}"
        if not re.fullmatch(r"\w+", name):
            yield Problem(key, f"{name!r} becomes part of metric names: use letters, digits and _.")
        if name == MAIN_SUITE:
            yield Problem(key, "is what the prompts of data.eval are called. Give another name.")
        if not suite.scorers:
            yield Problem(f"{key}.scorers", "is empty, so there is nothing to score. Add scorers.")
    if config.eval_suites and config.eval_interval == 0:
        yield Problem(
            "eval_suites",
            "are set, but eval_interval is 0, so nothing is evaluated. "
            "Set eval_interval above 0, or eval_suites={}.",
        )


def best_metric(config: RunConfig) -> Iterator[Problem]:
    """keep_best names something that evaluations of this recipe give."""
    if config.keep_best is None or not (config.save_interval and config.eval_interval):
        return
    scorers = {} if config.reward is None else config.reward.scorers
    names = ["eval/reward_mean", *(f"eval/{name}_mean" for name in scorers)]
    names += [f"eval/judge_{name}_mean" for name in config.eval_rewards]
    for suite, asked in config.eval_suites.items():
        names += [f"eval/{suite}/{name}_mean" for name in ("reward", *asked.scorers)]
    if config.keep_best not in names:
        yield Problem(
            "keep_best",
            f"is {config.keep_best}, but evaluations give {', '.join(names)}. Set one, or null.",
        )


def stop_conditions(config: RunConfig) -> Iterator[Problem]:
    watches = config.eval_interval and any(watched_scores(config).values())
    if "hacking" in config.stop_on and not watches:
        empty = "eval_rewards and eval_suites have no scorer that the reward has not"
        lacking = empty if config.eval_interval else "eval_interval is 0"
        yield Problem(
            "stop_on",
            f"has hacking, but {lacking}, so nothing can see it. "
            "Set eval_interval and eval_rewards or eval_suites, or stop_on=[].",
        )


def trained_scorers(config: RunConfig) -> Iterator[Problem]:
    scorers = {} if config.reward is None else config.reward.scorers
    for key, scorer in all_scorers(config):
        if scorer.optional and not key.startswith("eval_rewards."):
            yield Problem(
                f"{key}.optional",
                "is true, but a weighted total must be the same everywhere; only eval_rewards may "
                "be optional. Set it to false.",
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
