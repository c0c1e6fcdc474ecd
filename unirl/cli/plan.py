"""`unirl plan`: what a run would move, hold and cost, on a machine without a GPU or weights.

Exit codes: 0 it fits (or no budget was given), 2 it does not, 3 the recipe cannot be planned.
"""

from __future__ import annotations

import argparse
import functools
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
    from unirl.planning.hardware import Target
    from unirl.planning.plan import Plan

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
    # What is wrong is said before minutes may go by.
    config = _recipe(args, [])
    changed = _recipe(args, args.what_if) if args.what_if else None
    target = _target(args, config)
    if args.rollouts is not None and args.rollouts < 1:
        raise ConfigError(f"--rollouts {args.rollouts}: it must be at least 1.")
    if args.trace is not None:
        _require_writable(args.trace)
    replan = _planner(args, target)
    plan = replan(config)
    other = replan(changed) if changed is not None else None
    if args.trace is not None:
        _write_trace(args.trace, plan)
    if args.json:
        _print_json(args, plan, other)
    else:
        _print(args, plan, other, replan)
    return 0 if plan.fits else DOES_NOT_FIT


def _print_json(args: argparse.Namespace, plan: Plan, other: Plan | None) -> None:
    from unirl.planning.report import as_json

    told = as_json(plan, args.recipe)
    if other is not None:
        told["what_if"] = {"changes": args.what_if, **as_json(other, args.recipe)}
    print(json.dumps(told, indent=1))


def _print(
    args: argparse.Namespace,
    plan: Plan,
    other: Plan | None,
    replan: Callable[[RunConfig], Plan],
) -> None:
    from unirl.planning.remedy import smallest_change
    from unirl.planning.report import difference, text

    print(text(plan, args.recipe), flush=True)
    if not plan.fits:
        changes = smallest_change(plan, replan)
        hopeless = _HOPELESS if plan.too_big is not None else _HOPELESS_ON_HOST
        print(f"It fits with: {' '.join(map(str, changes))}" if changes else hopeless)
    if other is not None:
        print(f"\nWith {' '.join(args.what_if)}\n" + "\n".join(difference(plan, other)))


_HOPELESS = (
    "No change of residency, rollout.share_base, optimizer_resident, "
    "backend.activation_checkpointing, rollout.forward_batch_size or stack.micro_batch_size was "
    "found that makes it fit. Not tried: fewer samples (batch_size, sampling.samples_per_prompt), "
    "smaller images, more or larger devices (num_devices), a smaller model."
)
_HOPELESS_ON_HOST = (
    "Keeping more on the device (the residency keys, rollout.share_base, optimizer_resident, "
    "residency=auto) does not make it fit. Give it more host memory (host_budget_gib, --host-gib), "
    "or a device that holds more of the weights."
)


def _recipe(args: argparse.Namespace, more: Sequence[str]) -> RunConfig:
    overrides = [*args.overrides, *more]
    config, problems = compose_and_check(args.recipe, overrides, args.config_dir)
    here = [p for p in problems if not p.key.startswith(ELSEWHERE)]
    if here:
        raise config_error(args.recipe, here)
    return config


def _planner(args: argparse.Namespace, target: Target) -> Callable[[RunConfig], Plan]:
    """Plans variants of a recipe; what does not differ between them is worked out once."""
    from unirl.planning.plan import horizon, make_plan
    from unirl.planning.remedy import RememberedWorkspace
    from unirl.planning.scorers import scorer_components

    estimate = RememberedWorkspace()
    reward = functools.lru_cache(maxsize=None)(
        lambda asked: scorer_components(RunConfig.model_validate_json(asked))
    )

    def replan(config: RunConfig) -> Plan:
        count = horizon(config) if args.rollouts is None else args.rollouts
        window = config.accumulate_rollouts
        whole = max(count // window, LEAST_WINDOWS) * window
        keys = {"reward", "eval_rewards", "eval_suites", "eval_interval"}
        scorers = reward(config.model_dump_json(include=keys))
        return make_plan(config, target, scorers, min(whole, config.num_rollouts), estimate)

    return replan


LEAST_WINDOWS = 3
"""The first is not like the others, and the second follows the first step."""


def _require_writable(path: Path) -> None:
    try:
        path.touch()
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror or error}") from error


def _write_trace(path: Path, plan: Plan) -> None:
    from unirl.residency.perfetto import planned_events

    rates = {"onload": plan.target.onload_rate, "offload": plan.target.offload_rate}
    events = planned_events(
        plan.notes.phases, plan.notes.lines, rates, plan.needed, plan.target.budget_bytes
    )
    path.write_text(json.dumps(list(events)))


def _target(args: argparse.Namespace, config: RunConfig) -> Target:
    from unirl.planning.hardware import make_target  # imports torch

    return make_target(config, args.gpu, args.budget_gib, args.host_gib, args.link_gb)


def _compare(args: argparse.Namespace) -> int:
    """Exit code 0 when the run did what its plan says."""
    directory: Path = args.compare
    if args.overrides or args.what_if or args.json or args.trace or args.rollouts:
        raise ConfigError(
            "--compare plans the run's own config.yaml: leave out overrides, --what-if, --json, "
            "--trace and --rollouts."
        )
    for name in ("config.yaml", "transitions.jsonl"):
        if not (directory / name).is_file():
            raise ConfigError(
                f"--compare {directory}: there is no {directory / name}; name the folder of a run."
            )
    config = _config_of_run(directory)
    from unirl.planning.compare import comparison

    args.rollouts = config.num_rollouts
    plan = _planner(args, _target(args, config))(config)
    lines, is_equal = comparison(plan, directory)
    print("\n".join(lines))
    return 0 if is_equal else DOES_NOT_FIT


def _config_of_run(directory: Path) -> RunConfig:
    """Raises ConfigError for a file that is no configuration, and for a resumed run."""
    file = directory / "config.yaml"
    try:
        validated = validate(yaml.safe_load(file.read_text()))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if validated.config.load_dir is not None:
        raise ConfigError(f"--compare {directory}: a resumed run; only unbroken ones are compared.")
    problems = [*validated.problems, *checks.problems(validated.config)]
    here = [p for p in problems if not p.key.startswith(ELSEWHERE)]
    if here:
        raise config_error(str(file), here)
    return validated.config
