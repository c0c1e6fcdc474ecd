"""What `unirl evaluate` and `unirl sample` work on: a checkpoint as its run had it, or a recipe.

A checkpoint brings its own configuration, a recipe stands for the model it would begin with; both
take overrides. One device is used unless num_devices is among them. Sharding and what trains the
model are not checked, as none of it is used.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from unirl.checkpoint.finding import find_checkpoint, is_checkpoint_name
from unirl.cli.compose import compose_and_check
from unirl.cli.recipes import recipe_folders
from unirl.config.problem import config_error
from unirl.config.schema import LoggingConfig, RunConfig
from unirl.core.errors import ConfigError

_NOT_USED = ("backend", "reward_resident", "reward_fraction")
_OWN_DEFAULTS = ("num_devices=1", f"logging.console={LoggingConfig().console}")
"""A run on a cluster may have been quiet; who evaluates it sits in front of it."""


def add_options(command: argparse.ArgumentParser) -> None:
    """What both commands take besides the subject and overrides."""
    command.add_argument("--model-path", help="where the base model is, if it was moved")
    command.add_argument(
        "--shadow",
        help="sample with these shadow weights, e.g. old, or `none`. Default: what the run's "
        "rollouts sample with",
    )
    command.add_argument("--base", action="store_true", help="the untrained model too, beside it")


@dataclass(frozen=True)
class Subject:
    """What a command works on."""

    config: RunConfig
    checkpoint: Path | None
    """None for a recipe."""
    title: str
    """Which one it is and when in its run: "runs/x/checkpoints/checkpoint-4, after 4 of 9 ..."."""


def read_subject(args: argparse.Namespace, changes: Sequence[str]) -> Subject:
    """With the configuration's `changes` and then the user's overrides.

    Raises CheckpointError and ConfigError.
    """
    _require_said_once(changes, args.overrides)
    target = Path(args.recipe).expanduser()
    moved = [] if args.model_path is None else [f"model.path={quoted(args.model_path)}"]
    overrides = [*_OWN_DEFAULTS, *changes, *moved, *args.overrides]
    if not target.is_dir() and not _means_a_checkpoint(args.recipe, args.config_dir):
        if args.base:
            raise ConfigError(
                f"--base puts the untrained model beside a trained one, but {args.recipe} is a "
                "recipe, of which nothing is trained. Leave --base out, or name a run."
            )
        config = _composed(args.recipe, args.recipe, overrides, args.config_dir)
        return Subject(config, None, f"{args.recipe}, before any training")
    checkpoint = find_checkpoint(target, key=None)
    from unirl.checkpoint.state import read_trainer_state  # imports torch

    state = read_trainer_state(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "saved.yaml"
        file.write_text(yaml.safe_dump(dict(state.config), sort_keys=False), encoding="utf-8")
        config = _composed(str(checkpoint), str(file), overrides, args.config_dir)
    when = f"after {state.rollouts_done} of {state.config['num_rollouts']} rollouts"
    return Subject(config, checkpoint, f"{checkpoint}, {when}")


def _require_said_once(changes: Sequence[str], overrides: Sequence[str]) -> None:
    """An option stands for an override; the same key once more would quietly win."""
    keys = {change.partition("=")[0] for change in changes}
    for override in overrides:
        if override.partition("=")[0].lstrip("+~") in keys:
            raise ConfigError(f"{override} says again what an option says. Give one of them.")


def _means_a_checkpoint(word: str, config_dir: Path | None) -> bool:
    """Whether a word that is no folder was meant as one: a path, but not of recipes."""
    path = Path(word)
    first, *others = path.parts
    if path.suffix == ".yaml":
        return False
    if word.startswith(("/", "~", ".")) or any(map(is_checkpoint_name, path.parts)):
        return True
    if not others or recipe_folders(config_dir).is_folder(first):
        return False
    return Path(first).exists() or first == RunConfig().output_dir or "checkpoints" in others


def quoted(text: str) -> str:
    """As a value in an override."""
    escaped = text.replace("\\", "\\\\").replace("'", r"\'")
    return f"'{escaped}'"


def _composed(
    name: str, recipe: str, overrides: Sequence[str], config_dir: Path | None
) -> RunConfig:
    config, problems = compose_and_check(recipe, overrides, config_dir, not_used=_NOT_USED)
    if problems:
        raise config_error(name, problems)
    return config
