"""The command `unirl` with its subcommands, from `train` to `recipes`.

Arguments with `=`, or beginning with `+` or `~`, are overrides; the other one is the recipe. Exit
codes: 0 done, 1 the run failed or the doctor found something, 2 wrong usage or a plan that does not
fit, 3 wrong configuration; of a run that was stopped 130 (Ctrl-C), 143 (SIGTERM), 129 (SIGHUP), 124
(max_hours), 4 (stop_on); 141 when the reader of what is printed went away, as in `unirl recipes |
head`. Torch is imported only where a model is looked at, so the other commands answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from rich.console import Console
from rich.text import Text

from unirl import __version__
from unirl.cli import doctor, evaluate, export, plan, report, sample
from unirl.cli.check import checked, checked_but_for_files, summary
from unirl.cli.recipes import describe_components, describe_recipes, recipe_folders
from unirl.config.schema import RunConfig
from unirl.core.errors import ConfigError, UnirlError

if TYPE_CHECKING:
    from unirl.distributed.ranks import Ranks

RANK_0_PRINTS_SECONDS = 1.0
"""The launcher ends all ranks when one ends, so the others leave rank 0 this time to say why."""

CLOSED_PIPE = 141
"""The exit code of a program that SIGPIPE ends, to a shell."""

_EXAMPLES = """\
examples:
  unirl train quickstart                        a few minutes on one CPU core
  unirl train quickstart num_rollouts=5 seed=1  any key can be overridden
  unirl check quickstart stack.lora.rank=8      every problem at once, without loading weights
  unirl plan diffusion/sd3/sd3_replica_lora --gpu h100-80g       memory and moves, before it runs
  unirl doctor quickstart                       is the ratio 1, and is all else as it must be?
  unirl train quickstart --cfg                  print all keys with their values
  unirl evaluate runs/quickstart --base         held-out scores with intervals, before and after
  unirl sample runs/quickstart --prompt 'the number "7" in red on white' --output out
  unirl export runs/quickstart out --as model   the newest checkpoint, for other programs
  unirl report runs/quickstart                  curves, images, health: one page to send
  unirl train --config-dir mine --config-name my_overlay
  unirl recipes --components                    what recipes and built-in components there are
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # at exit a failure would be printed
    except BrokenPipeError:
        _drop_output()
        return CLOSED_PIPE


def _run(argv: Sequence[str]) -> int:
    args = _parse(argv)
    if os.getcwd() not in sys.path:  # so that own classes in the working folder can be named
        sys.path.append(os.getcwd())
    try:
        match args.command:
            case "train":
                return _train(args)
            case "check":
                return _check(args)
            case "plan":
                return plan.run(args)
            case "doctor":
                _let_waiting_threads_sleep()
                return doctor.run(args)
            case "evaluate":
                return _evaluate(args)
            case "sample":
                _let_waiting_threads_sleep()
                return sample.run(args)
            case "export":
                return export.run(args)
            case "report":
                return report.run(args)
            case _:
                return _recipes(args)
    except UnirlError as error:
        return _report(error)


def _drop_output() -> None:
    """What Python still holds for a reader that went away would fail once more at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _train(args: argparse.Namespace) -> int:
    _let_waiting_threads_sleep()
    words = (args.recipe, args.overrides, args.config_dir)
    if _is_rank() and not args.cfg:
        return _as_rank(lambda: _train_as_rank(*words))
    config = checked(*words)
    if args.cfg:
        print(yaml.safe_dump(config.model_dump(), sort_keys=False), end="")
        return 0
    if config.num_devices > 1:
        from unirl.distributed.group import require_local_devices  # imports torch
        from unirl.runtime.launch import launch

        require_local_devices(config.num_devices, config.device)
        return launch(args.argv, config.num_devices)
    from unirl.runtime.run import run  # imports torch

    return run(config)


def _let_waiting_threads_sleep() -> None:
    """Spinning OpenMP threads cost a busy machine 2 to 100 times the work.

    A spin of microseconds first makes small models a quarter faster. Read when torch is loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _evaluate(args: argparse.Namespace) -> int:
    _let_waiting_threads_sleep()
    if _is_rank():
        return _as_rank(lambda: evaluate.run_as_rank(args))
    return evaluate.run(args)


def _is_rank() -> bool:
    """Whether a launcher started this process as one of several."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def _as_rank(run: Callable[[], int]) -> int:
    """Rank 0, which is told of every rank's failure, says why; the others leave it the time."""
    try:
        return run()
    except UnirlError as error:
        if os.environ["RANK"] == "0":
            raise
        time.sleep(RANK_0_PRINTS_SECONDS)
        return _exit_code(error)


def _train_as_rank(recipe: str, overrides: Sequence[str], config_dir: Path | None) -> int:
    from unirl.runtime.run import run_as_rank  # imports torch

    def read_config(ranks: Ranks) -> RunConfig:
        read = checked if ranks.is_main else checked_but_for_files
        return read(recipe, overrides, config_dir)

    return run_as_rank(read_config)


def _check(args: argparse.Namespace) -> int:
    print(summary(args.recipe, checked(args.recipe, args.overrides, args.config_dir)))
    return 0


def _recipes(args: argparse.Namespace) -> int:
    if args.components:
        for key, name, description in describe_components():
            print(f"{key:28} {name:12} {description}")
        return 0
    recipes = describe_recipes(recipe_folders(args.config_dir))
    width = max(len(name) for name, _ in recipes)
    for name, description in recipes:
        print(f"{name:{width}}  {description}")
    return 0


def _exit_code(error: UnirlError) -> int:
    return 3 if isinstance(error, ConfigError) else 1


def _report(error: UnirlError) -> int:
    text = Text.assemble(("error: ", "bold red"), str(error))
    Console(stderr=True, soft_wrap=True).print(text)
    return _exit_code(error)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    # Options may stand between overrides; argparse hands back the words after them as unknown.
    args, rest = parser.parse_known_args(argv)
    args.argv = list(argv[1:])  # after the command
    takes_a_recipe = args.command not in ("recipes", "export", "report")
    if rest and not takes_a_recipe:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if takes_a_recipe:
        _sort_words(parser, args, [*args.words, *rest])
    return args


def _sort_words(
    parser: argparse.ArgumentParser, args: argparse.Namespace, words: Sequence[str]
) -> None:
    """Into args.recipe and args.overrides."""
    options = [word for word in words if word.startswith("-")]
    if options:
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    args.overrides = [word for word in words if "=" in word or word.startswith(("+", "~"))]
    names = [word for word in words if word not in args.overrides]
    names += [args.config_name] if args.config_name else []
    if args.cfg and "job" in names:  # `--cfg job --resolve`, as other Hydra programs have it
        names.remove("job")
    if len(names) > 1:
        parser.error(f"one recipe at a time, found {' and '.join(names)}")
    if not names and args.command == "plan" and args.compare is not None:
        args.recipe = str(args.compare)
        return
    if not names:
        takes_runs = args.command in ("evaluate", "sample")
        asked = "which checkpoint, run or recipe" if takes_runs else "which recipe"
        parser.error(f"{asked}? `unirl recipes` lists recipes; overrides look like key=value")
    args.recipe = names[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="unirl",
        allow_abbrev=False,
        description="Post-train diffusion and flow-matching models with reinforcement learning.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"unirl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train a model", allow_abbrev=False)
    check = commands.add_parser(
        "check", help="report every problem of a recipe; loads no weights", allow_abbrev=False
    )
    planned = commands.add_parser(
        "plan",
        help="what a run moves and holds on the device, without a GPU or weights",
        allow_abbrev=False,
    )
    plan.add_options(planned)
    examined = commands.add_parser(
        "doctor",
        help="sample the first window and say whether ratio, gradients and the like are right",
        allow_abbrev=False,
    )
    doctor.add_options(examined)
    evaluated = commands.add_parser(
        "evaluate", help="score a checkpoint on held-out prompts", allow_abbrev=False
    )
    evaluate.add_options(evaluated)
    sampled = commands.add_parser(
        "sample", help="images of a checkpoint for your prompts", allow_abbrev=False
    )
    sample.add_options(sampled)
    for command in (evaluated, sampled):
        command.add_argument("words", nargs="*", metavar="CHECKPOINT | RUN | RECIPE | KEY=VALUE")
        command.set_defaults(cfg=False, config_name=None)
        _add_config_dir(command)
    for command in (train, check, planned, examined):
        command.add_argument("words", nargs="*", metavar="RECIPE | KEY=VALUE")
        command.add_argument("--config-name", metavar="RECIPE", help="the same as RECIPE")
        _add_config_dir(command)
    train.add_argument("--cfg", action="store_true", help="print the configuration and stop")
    train.add_argument("--resolve", action="store_true", help=argparse.SUPPRESS)
    check.set_defaults(cfg=False)
    planned.set_defaults(cfg=False)
    examined.set_defaults(cfg=False)
    exported = commands.add_parser(
        "export", help="write a checkpoint as files that other programs load", allow_abbrev=False
    )
    export.add_options(exported)
    reported = commands.add_parser(
        "report", help="one HTML page about a run, or several compared", allow_abbrev=False
    )
    report.add_options(reported)
    recipes = commands.add_parser("recipes", help="list recipes")
    recipes.add_argument("--components", action="store_true", help="list built-in components")
    _add_config_dir(recipes)
    return parser


def _add_config_dir(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config-dir", type=Path, help="folder of your own recipes")
