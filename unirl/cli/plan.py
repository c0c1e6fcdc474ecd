"""`unirl plan`: what a run would move, hold and cost, on a machine without a GPU or weights.

Exit codes: 0 it fits (or no budget was given), 2 it does not, 3 the recipe cannot be planned.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from unirl.cli.compose import compose_and_check
from unirl.config import checks
from unirl.config.problem import config_error
from unirl.config.schema import RunConfig
from unirl.config.validate import validate
from unirl.core.errors import ConfigError

if TYPE_CHECKING:
    from unirl.core.components import Component
    from unirl.planning.blueprint import Blueprint
    from unirl.planning.hardware import Target
    from unirl.planning.plan import Plan
    from unirl.planning.workspace import Workspace

DOES_NOT_FIT = 2
ELSEWHERE = ("model.path", "data", "device", "load_dir")
"""Keys of files and devices that the machine of a plan need not have."""


def add_options(command: argparse.ArgumentParser) -> None:
    """The options of `unirl plan`."""
    budget = command.add_argument_group("what it must fit into")
    budget.add_argument("--gpu", help="a device by name, e.g. h100-80g, h200, h20-96g, rtx4090")
    budget.add_argument("--budget-gib", type=float, help="device memory, taken without a reserve")
    budget.add_argument("--host-gib", type=float, help="host memory for parked weights")
    budget.add_argument("--link-gb", type=float, help="GB/s between host and device, each way")
    output = command.add_argument_group("what it prints")
    output.add_argument("--json", action="store_true", help="the plan for programs")
    output.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto")
    output.add_argument("--rollouts", type=int, help="plan so many rollouts instead of some")
    output.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a second plan with this change, compared with the first",
    )
    output.add_argument(
        "--compare", type=Path, metavar="RUN_DIR", help="compare with what a run wrote down"
    )


def run(args: argparse.Namespace) -> int:
    """Plan, print, and say by the exit code whether it fits."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # processors are not needed here
    if args.compare is not None:
        return _compare(args)
    from unirl.planning.remedy import RememberedWorkspace

    config = _recipe(args, [])
    target, estimate = _target(args, config), RememberedWorkspace()

    def replan(config: RunConfig) -> Plan:
        return _plan(config, target, args.rollouts, estimate)

    plan = replan(config)
    if args.trace is not None:
        _write_trace(args.trace, plan)
    if args.json:
        from unirl.planning.report import as_json

        print(json.dumps(as_json(plan, args.recipe), indent=1))
    else:
        _print(args, plan, replan)
    return 0 if plan.fits else DOES_NOT_FIT


def _print(args: argparse.Namespace, plan: Plan, replan: Callable[[RunConfig], Plan]) -> None:
    from unirl.planning.remedy import smallest_change
    from unirl.planning.report import difference, text

    print(text(plan, args.recipe))
    if not plan.fits:
        changes = smallest_change(plan, replan)
        print(f"It fits with: {' '.join(map(str, changes))}" if changes else _HOPELESS)
    if args.what_if:
        other = replan(_recipe(args, args.what_if))
        print(f"\nWith {' '.join(args.what_if)}\n" + "\n".join(difference(plan, other)))


_HOPELESS = (
    "No change of residency, batch sizes or activation checkpointing makes it fit; use a larger "
    "device, more of them (num_devices), or a smaller model."
)


def _recipe(args: argparse.Namespace, more: Sequence[str]) -> RunConfig:
    overrides = [*args.overrides, *more]
    config, problems = compose_and_check(args.recipe, overrides, args.config_dir)
    here = [p for p in problems if not p.key.startswith(ELSEWHERE)]
    if here:
        raise config_error(args.recipe, here)
    return config


def _plan(
    config: RunConfig,
    target: Target,
    num_rollouts: int | None,
    estimate: Callable[[RunConfig, Blueprint], Workspace],
) -> Plan:
    from unirl.planning.plan import horizon, make_plan

    count = horizon(config) if num_rollouts is None else min(num_rollouts, config.num_rollouts)
    window = config.accumulate_rollouts
    whole = max(count // window, 1) * window
    return make_plan(config, target, _reward(config), whole, estimate)


def _reward(config: RunConfig) -> tuple[list[Component], list[str]]:
    """What the scorers hold, as far as they can be built here, and remarks on the others."""
    from unirl.planning.scorers import scorer_components

    return scorer_components(config)


def _write_trace(path: Path, plan: Plan) -> None:
    from unirl.residency.perfetto import planned_events

    rates = {"onload": plan.target.onload_rate, "offload": plan.target.offload_rate}
    events = planned_events(plan.notes.phases, plan.notes.lines, rates, plan.target.budget_bytes)
    try:
        path.write_text(json.dumps(list(events)))
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror or error}") from error


def _target(args: argparse.Namespace, config: RunConfig) -> Target:
    from unirl.planning.hardware import make_target  # imports torch

    return make_target(config, args.gpu, args.budget_gib, args.host_gib, args.link_gb)


def _compare(args: argparse.Namespace) -> int:
    """Exit code 0 when the run did what its plan says."""
    directory: Path = args.compare
    for name in ("config.yaml", "transitions.jsonl"):
        if not (directory / name).is_file():
            raise ConfigError(
                f"--compare {directory}: there is no {directory / name}; name the folder of a run."
            )
    from unirl.planning.compare import comparison
    from unirl.planning.workspace import estimate_workspace

    config = _config_of_run(directory / "config.yaml")
    plan = _plan(config, _target(args, config), config.num_rollouts, estimate_workspace)
    lines, is_equal = comparison(plan, directory)
    print("\n".join(lines))
    return 0 if is_equal else DOES_NOT_FIT


def _config_of_run(file: Path) -> RunConfig:
    try:
        written = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    validated = validate(written)
    problems = [*validated.problems, *checks.problems(validated.config)]
    here = [p for p in problems if not p.key.startswith(ELSEWHERE)]
    if here:
        raise config_error(str(file), here)
    return validated.config
