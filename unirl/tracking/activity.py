"""What a command is doing while it takes its time, on stderr, so that results stay apart.

A terminal shows it live and forgets it. Elsewhere a line says that something begins, and another
one each time that a further quarter of it is done. `logging.console=quiet` shows nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from unirl.tracking.console import ConsoleMode, RunConsole


class Activity:
    """One thing at a time."""

    def __init__(self, mode: ConsoleMode, file: TextIO | None = None) -> None:
        """`file` is stderr unless it is given."""
        self._console = RunConsole(mode, file=sys.stderr if file is None else file)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Something whose length is not known."""
        self._say(what)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with self._live(*columns) as progress:
            progress.add_task(what, total=None)
            yield

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Takes how many of `total` prompts are done."""
        self._say(f"{what}: {total} prompts")
        columns = (
            *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
            *(TextColumn("prompts"), TimeRemainingColumn()),
        )
        quarters = 0
        with self._live(*columns) as progress:
            task = progress.add_task(what, total=total)

            def note(num_done: int) -> None:
                nonlocal quarters
                progress.update(task, completed=num_done)
                if 4 * num_done // total > quarters:
                    quarters = 4 * num_done // total
                    self._say(f"{what}: {num_done} of {total} prompts")

            yield note

    def _live(self, *columns: ProgressColumn) -> Progress:
        hidden = not self._console.is_terminal
        return Progress(*columns, console=self._console, transient=True, disable=hidden)

    def _say(self, line: str) -> None:
        if not (self._console.is_terminal or self._console.is_quiet):
            self._console.print(line, highlight=False, soft_wrap=True)
