"""From plain values to a `RunConfig`, with every problem of the values at once.

Keys with a problem are left out and the rest is validated with the defaults in their place, so
that the checks across keys (`config.checks`) can still run on what is right.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from unirl.config.keys import suggest
from unirl.config.problem import Problem
from unirl.config.retired import retired_keys
from unirl.config.schema import RunConfig


@dataclass(frozen=True)
class Validated:
    """A configuration and what had to be left out of it."""

    config: RunConfig
    problems: tuple[Problem, ...]


def validate(values: Mapping[str, Any]) -> Validated:
    """Values of the schema's shape; unknown, retired and wrongly typed keys become problems."""
    problems = list(retired_keys(values))
    kept = _without_null_scorers(copy.deepcopy(dict(values)))
    for problem in problems:
        _remove(kept, problem.key.split("."))
    while True:
        try:
            return Validated(RunConfig.model_validate(kept), tuple(problems))
        except ValidationError as error:
            for path, details in _by_path(error.errors(), kept).items():
                problems.append(_problem(details, path))
                _remove(kept, path)


def _without_null_scorers(values: dict[str, Any]) -> dict[str, Any]:
    """An overlay leaves out a scorer or a suite of its base recipe by setting it to null."""
    suites = values.get("eval_suites")
    scored = [values.get("reward"), *(suites.values() if isinstance(suites, dict) else [])]
    blocks = [block.get("scorers") for block in scored if isinstance(block, dict)]
    for block in [values.get("eval_rewards"), suites, *blocks]:
        if isinstance(block, dict):
            for name in [name for name, scorer in block.items() if scorer is None]:
                del block[name]
    return values


def _by_path(
    details: Sequence[ErrorDetails], values: Mapping[str, Any]
) -> dict[tuple[str, ...], list[ErrorDetails]]:
    """A value that may be of several kinds has a detail for each kind that it is not."""
    found: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in details:
        found.setdefault(_path(detail, values), []).append(detail)
    return found


def _path(detail: ErrorDetails, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Where the value stands: the list it is an item of, and no kinds that pydantic tried."""
    path, block = [], values
    for part in detail["loc"]:
        if not isinstance(part, str) or not isinstance(block, Mapping):
            break
        path.append(part)
        block = block.get(part)
    return tuple(path)


def _problem(details: Sequence[ErrorDetails], path: Sequence[str]) -> Problem:
    detail = details[0]
    key, value, kind = ".".join(path), detail["input"], detail["type"]
    if kind == "extra_forbidden":
        while isinstance(value, dict) and len(value) == 1:  # name the key that was written
            (inner, value), *_ = value.items()
            key = f"{key}.{inner}"
        return Problem(key, f"is not a key. {suggest(key)}")
    if kind == "missing":
        return Problem(key, "must be set.")
    if kind in ("model_type", "dict_type"):
        return Problem(key, f"is {json.dumps(value, default=str)}, but it is a block of keys.")
    wanted = " or ".join(_wanted(one) for one in details)
    return Problem(
        key, f"is {json.dumps(value, default=str)}, but {wanted[0].lower()}{wanted[1:]}."
    )


def _wanted(detail: ErrorDetails) -> str:
    wanted = detail["msg"].removeprefix("Value error, ").replace("Input should", "it must")
    if detail["type"].endswith("_parsing"):  # ", unable to parse string as an integer" adds nothing
        wanted = wanted.partition(",")[0]
    return wanted


def _remove(values: dict[str, Any], path: Sequence[str]) -> None:
    """Take the key out; where it is missing although required, its block goes."""
    *parents, leaf = path
    block = values
    for part in parents:
        block = block[part]
    if leaf in block:
        del block[leaf]
    else:
        _remove(values, parents)
