"""Whether two evaluations differ by the weights alone, or by how they were made, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from unirl.checkpoint.changes import flatten
from unirl.checkpoint.identity import differences
from unirl.checkpoint.state import TrainerState
from unirl.config.schema import RunConfig
from unirl.config.suites import asked_suites
from unirl.trainer.requests import evaluation_params


def evaluation_changes(
    saved: TrainerState, config: RunConfig, identity: Mapping[str, str]
) -> tuple[str, ...]:
    """`key: old -> new` of everything that would change an evaluation of the very weights of a
    checkpoint; `identity` is that of the present run.

    Judges and suites count where both have one of that name: another one changes no number.
    """
    try:
        before = RunConfig.model_validate(saved.config)
    except ValidationError:
        return ("the configuration was saved by another version of unirl",)
    changed = [
        *_differing(_decisive(before), _decisive(config)),
        *_differing(_monitoring(before, config), _monitoring(config, before)),
    ]
    contents = {f"content of {suite.key}" for suite in asked_suites(config)}
    contents.add("content of model.path")
    return (*changed, *(d for d in differences(saved.identity, identity) if _name(d) in contents))


def _decisive(config: RunConfig) -> dict[str, Any]:
    """What noise, prompts, sampling and reward of an evaluation follow from."""
    return flatten(
        {
            "seed": config.seed,
            "eval_num_prompts": config.eval_num_prompts,
            "eval_samples_per_prompt": config.eval_samples_per_prompt,
            "eval_sampling": asdict(evaluation_params(config)),
            "model": config.model.model_dump(include={"family", "precision", "frozen_dtype"}),
            "reward": {} if config.reward is None else config.reward.model_dump()["scorers"],
        }
    )


def _monitoring(config: RunConfig, other: RunConfig) -> dict[str, Any]:
    """Judges and suites that the other configuration has too."""
    pairs = {
        "eval_rewards": (config.eval_rewards, other.eval_rewards),
        "eval_suites": (config.eval_suites, other.eval_suites),
    }
    return flatten(
        {
            key: {name: block.model_dump() for name, block in own.items() if name in others}
            for key, (own, others) in pairs.items()
        }
    )


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`key: old -> new` of each key that differs."""
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _name(difference: str) -> str:
    return difference.split(": ")[0]
