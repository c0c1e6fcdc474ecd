"""`unirl doctor`: sample and score the first window of a run, and say whether all is as it must be.

Exit codes: 0 all is fine, 1 something is not, 3 wrong configuration.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unirl.cli.check import checked

if TYPE_CHECKING:
    from unirl.runtime.doctor import Examination
    from unirl.train.examination import Level
    from unirl.train.findings.case import Finding

NOT_FINE = 1


def add_options(command: argparse.ArgumentParser) -> None:
    """The options of `unirl doctor`."""
    command.add_argument("--json", action="store_true", help="the findings for programs")


def run(args: argparse.Namespace) -> int:
    """Examine, print, and say by the exit code whether all is fine."""
    config = checked(args.recipe, args.overrides, args.config_dir)
    from unirl.runtime.doctor import as_json, examine_recipe  # imports torch

    examination = examine_recipe(config)
    if args.json:
        print(json.dumps(as_json(examination), indent=1))
    else:
        show(examination, args.recipe, Console())
    return 0 if examination.is_fine else NOT_FINE


def show(examination: Examination, recipe: str, console: Console) -> None:
    """Both tables and the verdict."""
    console.print(_findings_table(examination.findings))
    if examination.levels:
        console.print(_levels_table(examination.levels))
    bad = [finding.name for finding in examination.findings if not finding.is_fine]
    verdict = f"not fine: {', '.join(bad)}" if bad else "all is fine"
    console.print(f"{recipe}: {verdict}", soft_wrap=True, highlight=False)


def _findings_table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        mark = Text("fine", "green") if finding.is_fine else Text("not fine", "bold red")
        change = f" Set {finding.key}." if finding.key else ""
        told = Text.assemble((f"{finding.value}. ", "bold"), finding.sentence, (change, "red"))
        table.add_row(mark, finding.name, told)
    return table


def _levels_table(levels: Sequence[Level]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    heads = ("step", "noise level", "std", "|dlog p|", "largest", "batch of 1", "gradient", "rows")
    for head in heads:
        table.add_column(head, justify="right")
    for level in levels:
        table.add_row(*_level_cells(level))
    return table


def _level_cells(level: Level) -> list[str]:
    replay = level.replay
    numbers = ["", "", "", ""]
    if replay is not None:
        differences = (replay.mean_difference, replay.max_difference, replay.max_alone_difference)
        numbers = [f"{replay.std:.3g}", *(f"{one:.1e}" if one else "0" for one in differences)]
    return [
        "" if level.step is None else str(level.step),
        "" if level.sigma is None else f"{level.sigma:.3g}",
        *numbers,
        f"{level.gradient_norm:.1e}",
        str(level.num_rows),
    ]
