"""What a person sees while a run goes on, and the log file that keeps it.

On a terminal: a progress bar below the log. In a pipe: one plain line per rollout. `run.log` gets
the log and the lines in either case. Everything is printed by one rich `Console`, so nothing tears
the bar.

    rollout 12/100  reward=0.512 loss=0.0031 gn=0.82 lr=3.0e-04 ratio=1-2.0e-07±3.1e-05 clip=0.12
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from unirl.core.types import SamplingParams
from unirl.tracking.files import output_errors
from unirl.tracking.intervals import Interval
from unirl.tracking.tracker import Panel, Row, Sink

_log = logging.getLogger("unirl")
# The bar shows these lines' content, so a terminal leaves them out.
_rollout_log = logging.getLogger("unirl.rollout_lines")


class ConsoleSink(Sink):
    """Shows rollouts and evaluations; prints through `setup_logging`'s handlers."""

    def __init__(
        self,
        console: Console,
        num_rollouts: int,
        first_rollout: int,
        eval_sampling: SamplingParams,
        eval_samples_per_prompt: int,
    ) -> None:
        self._num_rollouts = num_rollouts
        self._eval_settings = (
            f"{eval_samples_per_prompt} samples/prompt, {eval_sampling.num_inference_steps} steps, "
            f"{eval_sampling.width}x{eval_sampling.height}, "
            f"cfg={eval_sampling.guidance_scale:g} eta={eval_sampling.eta:g}"
        )
        self._progress = Progress(
            TextColumn("rollout {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
            expand=True,
            refresh_per_second=4,
            # Seconds the time left is judged by: long, because evaluations come in between.
            speed_estimate_period=24 * 3600,
        )
        self._task = self._progress.add_task(
            "rollouts", total=num_rollouts, completed=first_rollout, numbers=""
        )

    def log(self, row: Row) -> None:
        self._progress.start()
        if row.kind == "eval":
            _log.info("%s", eval_line(row, self._eval_settings))
            return
        _rollout_log.info("%s", rollout_line(row, self._num_rollouts))
        numbers = _fields(row.metrics, _BAR_FIELDS)
        self._progress.update(self._task, completed=row.rollout + 1, numbers=numbers)

    def show(self, panel: Panel) -> None:
        """Pictures do not fit into a console."""

    def close(self) -> None:
        self._progress.stop()


def rollout_line(row: Row, num_rollouts: int) -> str:
    """`rollout i/N  reward=... loss=...`, with the fields that the row has."""
    return f"rollout {row.rollout + 1}/{num_rollouts}  {_fields(row.metrics, _LINE_FIELDS)}"


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
    evaluations: Sequence[Mapping[str, float]], changes: Mapping[str, Interval], run_dir: Path
) -> None:
    """The run's last lines: first and last evaluation compared, and where the files lie.

    changes: of metrics whose samples are on record, taken prompt by prompt.
    """
    lines = []
    if len(evaluations) > 1:
        lines = _before_after_table(evaluations[0], evaluations[-1], changes)
    if len(evaluations) == 1:
        lines = ["Evaluated once: set eval_interval to num_rollouts or less to compare."]
    lines.append(f"Everything is in {run_dir}: metrics.jsonl, run.log, images, checkpoints.")
    _log.info("%s", "\n".join(lines))


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


def setup_logging(run_dir: Path, console: Console) -> None:
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
    """Prints records above the progress bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(level=logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if self._console.is_terminal and record.name == _rollout_log.name:
            return
        style = {logging.INFO: "", logging.WARNING: "yellow"}
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        text = Text(level + self.format(record), style=style.get(record.levelno, "red"))
        # A pipe gets whole lines, for grep; a terminal gets them wrapped between words.
        self._console.print(text, soft_wrap=not self._console.is_terminal)


def _ratio_mean(metrics: Mapping[str, float]) -> str:
    """Clip ranges go down to 1e-5, so near 1 the deviation from it is printed instead of leading
    digits that never change."""
    deviation = metrics["train/ratio_mean"] - 1
    if deviation == 0:
        return "1"
    return f"1{deviation:+.1e}" if abs(deviation) < 1e-2 else f"{1 + deviation:.4f}"


def _ratio(metrics: Mapping[str, float]) -> str:
    return f"{_ratio_mean(metrics)}±{metrics['train/ratio_std']:.1e}"


_Field = tuple[str, str, Callable[[Mapping[str, float]], str]]
"""Label, the metric that must be there, and how it is printed."""

_REWARD: _Field = ("reward", "rollout/reward_mean", lambda m: f"{m['rollout/reward_mean']:.3f}")
_CLIP: _Field = ("clip", "train/clip_fraction", lambda m: f"{m['train/clip_fraction']:.2f}")
_BAR_FIELDS = (_REWARD, ("ratio", "train/ratio_mean", _ratio_mean), _CLIP)
_LINE_FIELDS = (
    _REWARD,
    ("loss", "train/loss", lambda m: f"{m['train/loss']:.3g}"),
    ("gn", "train/grad_norm", lambda m: f"{m['train/grad_norm']:.3g}"),
    ("lr", "train/lr", lambda m: f"{m['train/lr']:.1e}"),
    ("ratio", "train/ratio_mean", _ratio),
    _CLIP,
)


def _fields(metrics: Mapping[str, float], fields: tuple[_Field, ...]) -> str:
    """The fields whose metric was logged: an algorithm without a ratio shows none."""
    return " ".join(f"{label}={show(metrics)}" for label, name, show in fields if name in metrics)
