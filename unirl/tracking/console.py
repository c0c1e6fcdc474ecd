"""What a person sees while a run goes on, and the log file that keeps it.

`logging.console` chooses. rich: a live display below the log, with reward, seconds per phase and
time left. plain: one line per window. quiet: warnings, errors and the summary at the end. auto:
rich on a terminal, plain in a pipe. `run.log` gets the log and the lines in every case. Everything
is printed by one rich `Console`, so nothing tears the display.

    rollout 12/100  reward=0.512 loss=0.0031 gn=0.82 lr=3.0e-04 ratio=1-2.0e-07±3.1e-05 clip=0.12
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from unirl.core.types import SamplingParams
from unirl.tracking.files import output_errors
from unirl.tracking.intervals import Interval
from unirl.tracking.line_fields import LINE_FIELDS, fields
from unirl.tracking.live_display import LiveDisplay
from unirl.tracking.running import Running
from unirl.tracking.time_left import TimeLeft
from unirl.tracking.tracker import Panel, Row, Sink

_log = logging.getLogger("unirl")
# The live display shows these lines' content, so it leaves them out.
_rollout_log = logging.getLogger("unirl.rollout_lines")
_summary_log = logging.getLogger("unirl.summary")

ConsoleMode = Literal["auto", "rich", "plain", "quiet"]


class RunConsole(Console):
    """rich's console in one of the modes; its reader may go away without ending the run."""

    def __init__(
        self, mode: ConsoleMode, file: TextIO | None = None, width: int | None = None
    ) -> None:
        """`file` is stdout unless it is given."""
        as_mode = {"auto": None, "rich": True, "plain": False, "quiet": False}
        output: Any = _ForgivingFile(sys.stdout if file is None else file)
        super().__init__(file=output, width=width, force_terminal=as_mode[mode])
        self.is_quiet = mode == "quiet"


class _ForgivingFile:
    """Drops what cannot be written, as into `| head` or a terminal that is gone: run.log has it."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.encoding = file.encoding

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        """What Python still holds would fail once more at exit, with an exit code of its own."""
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())


class ConsoleSink(Sink):
    """Shows windows and evaluations; prints through `setup_logging`'s handlers."""

    def __init__(
        self,
        console: Console,
        num_rollouts: int,
        first_rollout: int,
        eval_sampling: SamplingParams,
        eval_samples_per_prompt: int,
        time_left: TimeLeft,
        running: Running,
    ) -> None:
        self._num_rollouts = num_rollouts
        self._eval_settings = (
            f"{eval_samples_per_prompt} samples/prompt, {eval_sampling.num_inference_steps} steps, "
            f"{eval_sampling.width}x{eval_sampling.height}, "
            f"cfg={eval_sampling.guidance_scale:g} eta={eval_sampling.eta:g}"
        )
        self._display = LiveDisplay(num_rollouts, first_rollout, time_left, running)
        self._live = Live(self._display, console=console, auto_refresh=False)
        if console.is_terminal:
            self._live = Live(self._display, console=console, refresh_per_second=4)
            self._live.start()

    def log(self, row: Row) -> None:
        if row.kind == "eval":
            _log.info("%s", eval_line(row, self._eval_settings))
        else:
            _rollout_log.info("%s", rollout_line(row, self._num_rollouts))
        self._display.add(row)

    def show(self, panel: Panel) -> None:
        """Pictures do not fit into a console."""

    def close(self) -> None:
        self._display.end()
        self._live.stop()


def rollout_line(row: Row, num_rollouts: int) -> str:
    """`rollout i/N  reward=... loss=...`, with the fields that the row has."""
    return f"rollout {row.rollout + 1}/{num_rollouts}  {' '.join(fields(row.metrics, LINE_FIELDS))}"


def eval_line(row: Row, settings: str) -> str:
    """`EVAL step N (settings) key=value ...`, a mean with half its 95 % interval."""
    values = []
    for name, value in row.metrics.items():
        if not name.startswith("eval/") or name.endswith("_ci95"):
            continue
        half_width = row.metrics.get(f"{name.removesuffix('_mean')}_ci95")
        interval = "" if half_width is None else f"±{half_width:.2g}"
        values.append(f"{name.removeprefix('eval/')}={value:.4g}{interval}")
    return f"EVAL step {row.rollout} ({settings}) {' '.join(values)}"


def summary(
    evaluations: Sequence[Row],
    changes: Mapping[str, Interval],
    run_dir: Path,
    rollouts_done: int,
    max_width: float = math.inf,
) -> None:
    """The run's last lines: first and last evaluation compared, and where the files lie.

    evaluations: those that can be compared. changes: of metrics whose samples are on record, taken
    prompt by prompt. A table wider than `max_width` has its names on lines of their own.
    """
    lines = []
    if len(evaluations) > 1:
        lines = _before_after_table(evaluations[0].metrics, evaluations[-1].metrics, changes)
        if max(map(len, lines)) > max_width:
            lines = _narrow_table(lines)
        first, last = evaluations[0].rollout, evaluations[-1].rollout
        if (first, last) != (0, rollouts_done):
            lines.append(f"before: after {first} rollouts; after: after {last} of {rollouts_done}")
    if len(evaluations) == 1:
        step = evaluations[0].rollout
        lines = [f"Evaluated once, after {step} rollouts: nothing to compare, see eval_interval."]
    lines.append(f"Everything is in {run_dir}: metrics.jsonl, run.log, images, checkpoints.")
    _summary_log.info("%s", "\n".join(lines))


def _before_after_table(
    before: Mapping[str, float], after: Mapping[str, float], changes: Mapping[str, Interval]
) -> list[str]:
    names = [name for name in before if name in after and name.startswith("eval/")]
    names = [name for name in names if name.endswith("_mean")]
    width = max(len(name) for name in names)
    explained = " ± 95 % over prompts" if changes else ""
    lines = [f"{'':<{width}}   before  ->    after    change{explained}"]
    for name in names:
        old, new = before[name], after[name]
        half_width = changes[name].half_width if name in changes else math.nan
        interval = "" if math.isnan(half_width) else f" ± {half_width:.4f}"
        lines.append(f"{name:<{width}}  {old:7.4f}  ->  {new:7.4f}  {new - old:+8.4f}{interval}")
    return lines


def _narrow_table(lines: Sequence[str]) -> list[str]:
    """The table with each name above its numbers."""
    header, *rows = lines
    narrow = [" ".join(header.split())]
    for row in rows:
        name, *numbers = row.split()
        narrow += [name, f"  {' '.join(numbers)}"]
    return narrow


def setup_logging(run_dir: Path, console: RunConsole) -> None:
    """Send the logger "unirl" to `<run_dir>/run.log`, and INFO and above to the console.

    A second call replaces the first one's handlers.

    Raises:
        UnirlError: `run.log` cannot be written.
    """
    path = run_dir / "run.log"
    with output_errors(path):
        run_dir.mkdir(parents=True, exist_ok=True)
        to_file = logging.FileHandler(path, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _replace_handlers([to_file, _ConsoleHandler(console)])


def setup_rank_logging(run_dir: Path, rank: int) -> None:
    """Send warnings and tracebacks of a rank without a console to `<run_dir>/logs/rank-<rank>.log`.

    Folder and file are made by the first one.
    """
    to_file = _MakesItsFolder(run_dir / "logs" / f"rank-{rank}.log", encoding="utf-8", delay=True)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    to_file.addFilter(lambda record: record.levelno >= logging.WARNING or bool(record.exc_info))
    _replace_handlers([to_file])


class _MakesItsFolder(logging.FileHandler):
    """Once there is something to write."""

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


def _replace_handlers(handlers: Sequence[logging.Handler]) -> None:
    for handler in list(_log.handlers):
        _log.removeHandler(handler)
        handler.close()
    for handler in handlers:
        _log.addHandler(handler)
    _log.setLevel(logging.DEBUG)


class _ConsoleHandler(logging.Handler):
    """Prints records above the live display."""

    def __init__(self, console: RunConsole) -> None:
        super().__init__(level=logging.INFO)
        self._console = console

    def filter(self, record: logging.LogRecord) -> bool:
        if self._console.is_quiet:
            return record.levelno >= logging.WARNING or record.name == _summary_log.name
        return not (self._console.is_terminal and record.name == _rollout_log.name)

    def emit(self, record: logging.LogRecord) -> None:
        style = {logging.INFO: "", logging.WARNING: "yellow"}
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        text = Text(level + self.format(record), style=style.get(record.levelno, "red"))
        # A pipe gets whole lines, for grep; a terminal gets them wrapped between words.
        self._console.print(text, soft_wrap=not self._console.is_terminal)
