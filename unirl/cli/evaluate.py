"""`unirl evaluate`: a checkpoint's held-out scores with intervals, on its own prompts or others.

num_devices=N shares the prompts between N ranks, each with a whole model on a device of its own.

Exit codes: 0 evaluated, 1 the checkpoint, the model or a scorer failed, 3 wrong configuration.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.cli import subject
from unirl.cli.check import plural, suite_problems
from unirl.cli.subject import Subject
from unirl.config.problem import config_error
from unirl.config.suites import AskedSuite, asked_suites
from unirl.core.errors import ConfigError
from unirl.tracking.intervals import metric_prefix

if TYPE_CHECKING:
    from unirl.distributed.ranks import Ranks
    from unirl.runtime.evaluate import Assessment


def add_options(command: argparse.ArgumentParser) -> None:
    """The options of `unirl evaluate`."""
    command.add_argument(
        "--prompts",
        metavar="FILE",
        help="evaluate on all prompts of this file instead of the run's suites",
    )
    command.add_argument(
        "--scorer",
        dest="scorers",
        action="append",
        default=[],
        metavar="NAME",
        help="score with this instead of the run's scorers and judges: a built-in name or "
        "package.module:Class; may be repeated",
    )
    command.add_argument(
        "--output", type=Path, help="empty or new folder for samples' scores, images and metrics"
    )
    subject.add_options(command)


def run(args: argparse.Namespace) -> int:
    """Evaluate and print a table."""
    asked = _asked(args)
    from unirl.distributed.ranks import OneRank

    if asked.config.num_devices == 1:
        return _assess(args, asked, OneRank())
    from unirl.distributed.group import require_local_devices  # imports torch
    from unirl.runtime.launch import launch

    require_local_devices(asked.config.num_devices, asked.config.device)
    return launch(["evaluate", *args.argv], asked.config.num_devices, module="unirl")


def run_as_rank(args: argparse.Namespace) -> int:
    """Evaluate as one of the ranks that a launcher started; rank 0 reads for all, and prints."""
    from unirl.distributed.group import joined  # imports torch
    from unirl.distributed.watch import watching

    with joined() as ranks, watching(ranks):
        return _assess(args, ranks.on_main(lambda: _asked(args)), ranks)


def _asked(args: argparse.Namespace) -> Subject:
    read = subject.read_subject(args, _changes(args))
    # Of a run that evaluated nothing it is asked for all the same.
    config = read.config.model_copy(update={"eval_interval": read.config.eval_interval or 1})
    problems = list(suite_problems(config))
    if problems:
        raise config_error(args.recipe, problems)
    return replace(read, config=config)


def _assess(args: argparse.Namespace, asked: Subject, ranks: Ranks) -> int:
    from unirl.runtime.evaluate import assess  # imports torch

    with tempfile.TemporaryDirectory() as nowhere:
        folder = args.output or Path(nowhere)
        found = assess(
            asked.config,
            asked.checkpoint,
            folder,
            ranks,
            shadow=args.shadow,
            with_base=args.base,
        )
    if ranks.is_main:
        _show(args, asked, found)
    return 0


def _show(args: argparse.Namespace, asked: Subject, found: Assessment) -> None:
    print(asked.title)
    print("\n".join(_evaluated(suite, found) for suite in asked_suites(asked.config)))
    print("means ± half their 95 % interval over prompts")
    print("\n".join(table(found)))
    if args.output is not None:
        print(f"Everything is in {args.output}: metrics.jsonl, evaluations, images.")


def _evaluated(suite: AskedSuite, found: Assessment) -> str:
    """ "eval: 64 prompts x 1 sample of pkg:numbers/heldout.jsonl"."""
    num_prompts, samples = found.num_prompts[suite.name], suite.samples_per_prompt
    of_file = f"{plural(num_prompts, 'prompt')} x {plural(samples, 'sample')} of {suite.path}"
    scored = round(found.metrics[f"{metric_prefix(suite.name)}/num_samples"])
    dropped = num_prompts * samples - scored
    return f"{suite.name}: {of_file}" + (f", {dropped} of them not scored" if dropped else "")


def table(found: Assessment) -> list[str]:
    """A line per metric; with the untrained model, its mean and the paired change too."""
    names = [name for name in found.metrics if name.endswith("_mean")]
    width = max(len(name) for name in names)
    lines = []
    if found.changes:
        lines.append(f"{'':<{width}}     base  ->    trained            change, prompt by prompt")
    for name in names:
        own = _with_interval(found.metrics[name], found.metrics.get(_interval_name(name)))
        if name in found.changes:
            change = found.changes[name]
            own = f"{found.base[name]:7.4f}  ->  {own}   {change.mean:+.4f}"
            own += "" if change.num_prompts < 2 else f" ± {change.half_width:.4f}"
        lines.append(f"{name:<{width}}  {own}")
    return lines


def _interval_name(name: str) -> str:
    return f"{name.removesuffix('_mean')}_ci95"


def _with_interval(mean: float, half_width: float | None) -> str:
    return f"{mean:7.4f}" + ("" if half_width is None else f" ± {half_width:.4f}")


def _changes(args: argparse.Namespace) -> list[str]:
    """Overrides; a block is set to null first, as another value would be merged into it."""
    changes: list[str] = []
    if args.prompts is not None:
        changes += ["eval_suites=null", "eval_suites={}", "eval_num_prompts=null"]
        changes += [f"data.eval={subject.quoted(args.prompts)}"]
    if args.scorers:
        named = [_scorer_name(path) for path in args.scorers]
        twice = sorted({name for name in named if named.count(name) > 1})
        if twice:
            raise ConfigError(
                f"--scorer: {' and '.join(twice)} is there more than once, but a score has one "
                "name. Name each scorer once; for two classes of one name, derive a class."
            )
        scorers = ",".join(map(_scorer, args.scorers))
        changes += ["reward=null", f"reward={{scorers:{{{scorers}}}}}"]
        changes += ["eval_rewards=null", "eval_rewards={}"]
    return changes


def _scorer(path: str) -> str:
    return f"{_scorer_name(path)}:{{path:{subject.quoted(path)}}}"


def _scorer_name(path: str) -> str:
    return path.rpartition(":")[2].rpartition(".")[2]
