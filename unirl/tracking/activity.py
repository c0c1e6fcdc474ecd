"""What a command is doing while it takes its time, on stderr, so that results stay apart.

A terminal shows it live and forgets it. Elsewhere a line says that something begins, and another
one each time that a further quarter of it is done. `logging.console=quiet` shows nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TextIO

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from unirl.tracking.console import ConsoleMode, RunConsole
from unirl.tracking.running import Running


class Activity:
    """One thing at a time."""

    def __init__(
        self,
        mode: ConsoleMode,
        file: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`file` is stderr unless it is given."""
        self._console = RunConsole(mode, file=sys.stderr if file is None else file)
        self._now = now

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Something whose length is not known."""
        self._say(what)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with self._live(*columns) as progress:
            progress.add_task(what, total=None)
            yield

    @contextmanager
    def counting(
        self, what: str, total: int, unit: str, running: Running | None = None
    ) -> Iterator[Count]:
        """Is told how many of `total` prompts or samples are done; `running` says by what."""
        self._say(f"{what}: {total} {unit}")
        columns = (
            *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
            *(TextColumn(unit), TimeRemainingColumn(), _Phase(running or Running())),
        )
        began, quarters, said = self._now(), 0, 0
        with self._live(*columns) as progress:
            task = progress.add_task(what, total=total)

            def show(num_done: float) -> None:
                nonlocal quarters, said
                progress.update(task, completed=num_done)
                if int(4 * num_done / total) > quarters and int(num_done) > said:
                    quarters, said = int(4 * num_done / total), int(num_done)
                    seconds = round((self._now() - began) * (total - num_done) / num_done)
                    left = f", {timedelta(seconds=seconds)} left" if seconds else ""
                    self._say(f"{what}: {int(num_done)} of {total} {unit}{left}")

            yield Count(total, show)

    def _live(self, *columns: ProgressColumn) -> Progress:
        hidden = not self._console.is_terminal
        return Progress(*columns, console=self._console, transient=True, disable=hidden)

    def _say(self, line: str) -> None:
        if not (self._console.is_terminal or self._console.is_quiet):
            self._console.print(line, highlight=False, soft_wrap=True)


class Count:
    """Takes what is done of something that is counted."""

    def __init__(self, total: int, show: Callable[[float], None]) -> None:
        self._total = total
        self._show = show
        self._reached = 0.0

    def reach(self, num_done: float) -> None:
        """So many are done."""
        self._reached = num_done
        self._show(num_done)

    def within(self, num_more: float) -> None:
        """Of those in hand the work of so many is done, since `reach` was called."""
        self._show(min(self._reached + num_more, self._total))


class _Phase(ProgressColumn):
    """What works at the moment."""

    def __init__(self, running: Running) -> None:
        super().__init__()
        self._running = running

    def render(self, task: Task) -> Text:
        phase = self._running.phase()
        return Text("" if phase is None else phase[0])
