"""What a run was set to: where it differs from the defaults, and where runs differ."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unirl.config.schema import RunConfig
from unirl.report.reading import RunFiles

ABSENT = "\N{EN DASH}"
NEUTRAL = frozenset(
    ("description", "run_name", "output_dir", "device", "num_threads", "load_dir", "save_dir")
)
"""Where and under what name a run goes; nothing that it learns."""


@dataclass(frozen=True)
class Setting:
    key: str
    values: tuple[str, ...]
    """One of each run, or of the run and the default."""
    is_neutral: bool


def from_defaults(run: RunFiles) -> list[Setting]:
    """Keys of a run whose value is not the default, with both."""
    return differing([run.config, RunConfig().model_dump(mode="json")])


def between(runs: Sequence[RunFiles]) -> list[Setting]:
    """Keys in which runs differ, those that matter first."""
    return differing([run.config for run in runs])


def differing(configs: Sequence[Mapping[str, Any]]) -> list[Setting]:
    flat = [dict(_flat(config)) for config in configs]
    every = dict.fromkeys(key for one in flat for key in one)
    # A block that is null or empty in one place is told by its keys in the other.
    blocks = {key[:end] for key in every for end, sign in enumerate(key) if sign == "."}
    keys = [key for key in every if key not in blocks]
    settings = [
        Setting(key, tuple(one.get(key, ABSENT) for one in flat), is_neutral(key))
        for key in keys
        if len({one.get(key, ABSENT) for one in flat}) > 1
    ]
    return sorted(settings, key=lambda setting: setting.is_neutral)


def is_neutral(key: str) -> bool:
    return key.split(".")[0] in NEUTRAL | {"logging"}


def learns_the_same(one: RunFiles, other: RunFiles) -> bool:
    """Whether two runs differ in nothing but the seed and what does not matter."""
    settings = between([one, other])
    return all(setting.is_neutral or setting.key == "seed" for setting in settings)


def evaluated_differently(runs: Sequence[RunFiles]) -> list[str]:
    """What makes rewards at evaluation not those of the same thing: keys, and prompts that changed
    under one path."""
    made = [_evaluation(run.config) for run in runs]
    # A judge or a suite that only one of them has changes no number of the others.
    for name in ("eval_rewards", "eval_suites"):
        blocks = [run.config.get(name) or {} for run in runs]
        shared = set.intersection(*map(set, blocks))
        for evaluation, block in zip(made, blocks, strict=True):
            evaluation[name] = {key: block[key] for key in sorted(shared)}
    keys = [setting.key for setting in differing(made)]
    if "data.eval" not in keys and _other_prompts(runs):
        keys.append("content of data.eval")
    return keys


def _other_prompts(runs: Sequence[RunFiles]) -> bool:
    """Whether the prompts that all of them got as far as evaluating are not the same."""
    texts = [texts for run in runs if (texts := run.evaluated_texts)]
    shared = min(map(len, texts), default=0)
    return len({one[:shared] for one in texts}) > 1


def _evaluation(config: Mapping[str, Any]) -> dict[str, Any]:
    """What an evaluation is made of; where eval_sampling has null, sampling counts. The kernel
    matters to stochastic steps alone."""
    sampling = config.get("sampling") or {}
    overlay = {
        key: sampling.get(key) if value is None else value
        for key, value in (config.get("eval_sampling") or {}).items()
        if key != "kernel" or config.get("eval_eta")
    }
    names = ("seed", "eval_num_prompts", "eval_samples_per_prompt", "eval_eta")
    return {
        "data": {"eval": (config.get("data") or {}).get("eval")},
        **{name: config.get(name) for name in names},
        "eval_sampling": overlay,
        "reward": {"scorers": (config.get("reward") or {}).get("scorers")},
    }


def command(run: RunFiles) -> str:
    """What repeats the run from the configuration it has written down."""
    words = ["unirl", "train", str(run.path / "config.yaml"), f"run_name={run.name}-again"]
    # A run that was resumed or saved elsewhere must not do so again.
    words += [f"{key}=null" for key in ("load_dir", "save_dir") if run.config.get(key) is not None]
    return shlex.join(words)


def _flat(block: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys with values as they are written in an override."""
    for name, value in block.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
