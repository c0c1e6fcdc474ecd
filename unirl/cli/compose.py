"""Hydra in, validated `RunConfig` out; every failure is one ConfigError that lists all problems.

Hydra composes the recipe and its config groups. Overrides of single keys are applied here instead,
so that all wrong ones are reported at once and any key of the schema can be set without `+`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from unirl.cli.recipes import RecipeFolders, locate
from unirl.config import checks
from unirl.config.keys import nearest_name
from unirl.config.problem import Problem, config_error
from unirl.config.schema import Block, RunConfig
from unirl.config.validate import validate


def compose(recipe: str, overrides: Sequence[str], config_dir: Path | None = None) -> RunConfig:
    """The checked configuration of a run; raises ConfigError listing every problem.

    `recipe` is a name below examples/ or `config_dir` without `.yaml`, or the path of a YAML file.
    """
    config, problems = compose_and_check(recipe, overrides, config_dir)
    if problems:
        raise config_error(recipe, problems)
    return config


def compose_and_check(
    recipe: str,
    overrides: Sequence[str],
    config_dir: Path | None = None,
    not_used: Sequence[str] = (),
) -> tuple[RunConfig, list[Problem]]:
    """The configuration, defaults in place of wrong keys, and all problems.

    `not_used`: keys that the caller does not read; checks that read them are left out.
    Raises ConfigError where nothing can be composed: no such recipe or group, unreadable YAML.
    """
    values, problems = _values(recipe, overrides, config_dir)
    validated = validate(values)
    problems.extend(validated.problems)
    bad_keys = [problem.key for problem in problems]
    return validated.config, [*problems, *checks.problems(validated.config, [*bad_keys, *not_used])]


def _values(
    recipe: str, overrides: Sequence[str], config_dir: Path | None
) -> tuple[dict[str, Any], list[Problem]]:
    name, folders = locate(recipe, config_dir)
    problems: list[Problem] = []
    groups, keys = _parse(overrides, folders, problems)
    composed = _compose_groups(recipe, name, groups, folders, problems)
    for override in keys:
        problems.extend(_apply(override, composed))
    values = _plain(composed, "", problems)
    for key in values:
        lost = isinstance(values[key], dict) and key not in RunConfig.model_fields
        if lost and folders.is_folder(key):
            raise config_error(recipe, [Problem(key, _MISSING_HEADER.format(folder=key))])
    return values, problems


_MISSING_HEADER = (
    "is a folder of recipes, and a recipe's keys ended up below its name. A recipe in the folder "
    "{folder}/ must begin with the line `# @package _global_`, which is missing."
)


def _compose_groups(
    recipe: str,
    name: str,
    groups: Sequence[Override],
    folders: RecipeFolders,
    problems: Sequence[Problem],
) -> DictConfig:
    """The recipe with its config groups, before overrides of single keys."""
    ConfigStore.instance().store("base", RunConfig().model_dump(), package="_global_")
    home = folders.home(name)  # Hydra takes the primary config from the first folder only
    assert home is not None, "the recipe was located"
    others = [f"file://{folder}" for folder in folders.all if folder != home]
    quoted = ",".join("'{}'".format(other.replace("'", r"\'")) for other in others)
    search = f"hydra.searchpath=[{quoted}]"
    try:
        with initialize_config_dir(str(home), "unirl", version_base="1.3"), _quiet_about_self():
            chosen = _choices(name, search) if groups else set()
            composed = hydra_compose(name, [search, *(_group(o, chosen) for o in groups)])
    except _COMPOSITION_ERRORS as error:
        misplaced = _lists_for_blocks(home / f"{name}.yaml") if _is_merge_of_list(error) else []
        reasons = misplaced or [Problem(name, _composition_reason(error, folders))]
        raise config_error(recipe, [*problems, *reasons]) from error
    OmegaConf.set_struct(composed, False)
    for override in groups:
        if not override.is_delete():
            _prefer(override, composed, folders)
    return composed


def _prefer(override: Override, composed: DictConfig, folders: RecipeFolders) -> None:
    """What is chosen on the command line wins over the recipe's own values, like a key set there.

    Hydra puts a recipe's values over those of its groups, also where another option was asked for.
    """
    group = override.key_or_group
    file = folders.option_file(group, str(override.value()))
    values = OmegaConf.load(file)
    assert isinstance(values, DictConfig)
    values.pop("defaults", None)
    is_global = re.search(r"^#\s*@package\s+_global_\s*$", file.read_text(), re.MULTILINE)
    composed.merge_with(values if is_global else {group: values})


@contextmanager
def _quiet_about_self() -> Iterator[None]:
    """Without `_self_` a recipe's own values win over its defaults list, as everybody expects."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "In .*: Defaults list is missing `_self_`")
        yield


def _choices(name: str, search: str) -> set[str]:
    """The config groups in the recipe's defaults list and those of its bases."""
    composed = hydra_compose(name, [search], return_hydra_config=True)
    return set(composed.hydra.runtime.choices)


def _group(override: Override, chosen: set[str]) -> str:
    """Hydra wants `+` before a group that the recipe has not, and only there."""
    text = str(override.input_line).lstrip("+")
    return text if override.is_delete() or override.key_or_group in chosen else f"+{text}"


_COMPOSITION_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    YAMLError,
    OSError,
    UnicodeDecodeError,
    RecursionError,
)


BLOCK_FORMS = {
    "reward.scorers": "{ocr: {path: ocr}, color: {path: color, weight: 0.5}}",
    "eval_rewards": "{exact_read: {path: exact_read}}",
    "eval_suites": "{mine: {data: mine.jsonl, scorers: {ocr: {path: ocr}}}}",
}
"""Of the blocks whose keys are names that the user chooses, as one writes them."""


def _is_merge_of_list(error: BaseException) -> bool:
    return "Cannot merge DictConfig with ListConfig" in str(error)


def _list_for_block(key: str) -> Problem:
    form = BLOCK_FORMS.get(key)
    written = "." if form is None else f" with a name for each entry, e.g. {form}."
    return Problem(key, f"is a list, but it is a block of keys{written}")


def _lists_for_blocks(file: Path) -> list[Problem]:
    """Of a recipe that Hydra cannot merge; its error names no key."""
    written = OmegaConf.load(file)
    assert isinstance(written, DictConfig)
    return [
        _list_for_block(key) for key in _blocks_given_as_list(written, RunConfig().model_dump())
    ]


def _blocks_given_as_list(
    written: Mapping[Any, Any], blocks: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    for name, value in written.items():
        block = blocks.get(str(name))
        if not isinstance(block, Mapping):
            continue
        if isinstance(value, ListConfig):
            yield f"{prefix}{name}"
        elif isinstance(value, DictConfig):
            yield from _blocks_given_as_list(value, block, f"{prefix}{name}.")


def _composition_reason(error: BaseException, folders: RecipeFolders) -> str:
    match error:
        case MissingConfigException():
            return _reason(error) + folders.nearest(error.missing_cfg_file or "")
        case UnicodeDecodeError():
            return f"is not a text file, or something in its defaults list is not: {error}"
        case RecursionError():
            return (
                "has a defaults list that leads back to itself. Rename one of the recipes: one in "
                "--config-dir hides a shipped recipe of the same name."
            )
        case _ if _is_merge_of_list(error):
            form = f"eval_rewards: {BLOCK_FORMS['eval_rewards']}"
            return f"builds on a file that has a list in place of a block of keys, e.g. of {form}."
        case _:
            return _reason(error)


def _parse(
    overrides: Sequence[str], folders: RecipeFolders, problems: list[Problem]
) -> tuple[list[Override], list[Override]]:
    """Overrides that choose a config group, for Hydra, and those of keys; others are problems."""
    groups: list[Override] = []
    keys: list[Override] = []
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            problems.append(
                Problem(text, f"cannot be read as key=value ({_reason(error)}). {_quoting(text)}")
            )
            continue
        problem = _malformed(override, text) or _unknown_option(override, folders)
        if problem is not None:
            problems.append(problem)
        elif _chooses_group(override, folders):
            groups.append(override)
        else:
            keys.append(override)
    return groups, keys


def _quoting(text: str) -> str:
    """How the word is written so that it can be read; an example where two quotes do not help."""
    key, _, value = text.partition("=")
    quoted = f"{key}='{value}'"
    changed_by_quotes = any(character in value for character in "'\"$`!\\")
    form = quoted if value and not changed_by_quotes and _is_readable(quoted) else "key='a=b'"
    return (
        "A value with commas, brackets, = or letters that are not ASCII needs quotes of two kinds: "
        f'"{form}".'
    )


def _is_readable(text: str) -> bool:
    try:
        OverridesParser.create().parse_override(text)
    except HydraException:
        return False
    return True


def _malformed(override: Override, text: str) -> Problem | None:
    if not override.key_or_group:
        return Problem(text, "has no key before the equals sign.")
    if override.is_sweep_override():
        found = f"is given several values in {text}; a list is written [a,b]."
        return Problem(override.key_or_group, found)
    return None


def _chooses_group(override: Override, folders: RecipeFolders) -> bool:
    options = folders.options(override.key_or_group)
    return bool(options) and (override.is_delete() or override.value() in options)


def _unknown_option(override: Override, folders: RecipeFolders) -> Problem | None:
    key, value = override.key_or_group, override.value()
    options = folders.options(key)
    is_option = isinstance(value, str) and value not in options
    if not options or not is_option or not _is_block(key):
        return None
    allowed, near = ", ".join(options), nearest_name(str(value), options)
    return Problem(key, f"is {value!r}, but the config group {key} has only: {allowed}.{near}")


def _is_block(key: str) -> bool:
    """Whether the config group fills a block; `layout` is a group and a plain key."""
    field = RunConfig.model_fields.get(key)
    return field is None or isinstance(field.default, Block)


def _apply(override: Override, composed: DictConfig) -> list[Problem]:
    """Set or delete one key in place."""
    key = override.key_or_group
    *parents, leaf = key.split(".")
    block: Any = composed
    try:
        for depth, part in enumerate(parents, start=1):
            if not isinstance(block, DictConfig) or part not in block:
                break  # a key that does not exist is reported by the validation
            block = block[part]
            if block is None:
                return [_null_block(override, parents[:depth])]
        if not override.is_delete():
            OmegaConf.update(composed, key, override.value(), merge=True, force_add=True)
        elif isinstance(block, DictConfig) and leaf in block:
            del block[leaf]
        else:
            return [Problem(key, "cannot be deleted: this recipe does not have it.")]
    except OmegaConfBaseException as error:
        is_list = _is_merge_of_list(error)
        return [_list_for_block(key) if is_list else Problem(key, _reason(error))]
    return []


def _null_block(override: Override, parents: Sequence[str]) -> Problem:
    block = ".".join(parents)
    rest = override.key_or_group.removeprefix(f"{block}.")
    return Problem(
        override.key_or_group,
        f"cannot be set: {block} is null in this recipe. "
        f"Set the whole block, e.g. '{block}={{{rest}: {override.value()}}}'.",
    )


def _plain(node: Any, prefix: str, problems: list[Problem]) -> dict[str, Any]:
    """Plain values with interpolations resolved; those that fail are left out and reported."""
    values: dict[str, Any] = {}
    for name in node:
        key = f"{prefix}{name}"
        try:
            value = node[name]
            if isinstance(value, ListConfig):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            missing = OmegaConf.is_missing(node, name)
            problems.append(Problem(key, "must be set." if missing else _reason(error)))
            continue
        except RecursionError:
            problems.append(Problem(key, "refers to itself."))
            continue
        nested = isinstance(value, DictConfig)
        values[str(name)] = _plain(value, f"{key}.", problems) if nested else value
    return values


def _reason(error: BaseException) -> str:
    """The library's own words without the parts that speak of its internals."""
    while not str(error) and error.__cause__ is not None:
        error = error.__cause__
    text = str(error)
    for internals in ("Config search path:", "\nSee https://hydra.cc", " expecting "):
        text = text.partition(internals)[0]
    lines = [line.strip() for line in text.splitlines()]
    noise = ("full_key:", "object_type=")
    return "\n".join(line for line in lines if line and not line.startswith(noise))
