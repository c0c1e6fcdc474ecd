"""Runs of the real command line on the shipped model, small enough for a test, and what they leave.

`train` runs in this process, `start` in one of its own where signals or a kill are needed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from unirl.cli.main import main
from unirl.tracking.metrics import describe

SMALL = (
    "num_threads=1",
    "num_rollouts=2",
    "batch_size=2",
    "sampling.samples_per_prompt=2",
    "sampling.num_inference_steps=4",
    "sampling.kernel=flow",
    "sampling.eta=0.7",
    "eval_sampling.num_inference_steps=null",
    "sampling.sde_steps={strategy:all,range:[0,0.5],num_steps:null}",
    "algorithm.old_log_prob=replay",
    "stack.scheduler={type:constant,warmup_steps:0}",
    "stack.optimizer.learning_rate=1e-3",
    "stack.shuffle_updates=false",
    "model.precision=fp32",
    "stack.num_updates_per_batch=1",
    "eval_interval=0",
    "eval_num_prompts=4",
    "~eval_rewards",
    "save_interval=0",
)
"""Seconds become tenths of a second; later overrides win."""

REPLICA = "diffusion/tiny/tiny_replica_lora"
GATE = "diffusion/tiny/tiny_residency_gate"


@dataclass(frozen=True)
class Run:
    """A run that ended."""

    exit_code: int
    directory: Path
    output: str
    errors: str

    def rows(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Of metrics.jsonl, all kinds or one."""
        rows = read_json_lines(self.directory / "metrics.jsonl")
        return [row for row in rows if kind in (None, row["kind"])]

    def numbers(self) -> list[dict[str, Any]]:
        """Rows without what a repetition may change: times and moves."""
        return [
            {name: value for name, value in row.items() if not _is_a_cost(name)}
            for row in self.rows()
        ]

    def moves(self) -> list[str]:
        """`train onload`, ... from transitions.jsonl."""
        moves = {line["transition"]: f"{line['role']} {line['move']}" for line in self.lines()}
        return list(moves.values())

    def lines(self) -> list[dict[str, Any]]:
        """Of transitions.jsonl."""
        return read_json_lines(self.directory / "transitions.jsonl")

    def logged_moves(self) -> list[str]:
        """The same from the lines of run.log."""
        lines = re.findall(r"lifecycle residency: (.+)", self.log)
        return [move for line in lines for move in line.split(", ")]

    @property
    def log(self) -> str:
        return (self.directory / "run.log").read_text()

    @property
    def checkpoints(self) -> list[str]:
        folder = self.directory / "checkpoints"
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        return sorted(name for name in names if name != "best")

    def weights(self, step: int) -> dict[str, Tensor]:
        return load_file(self.checkpoint(step) / "weights.safetensors")

    def optimizer(self, step: int) -> dict[str, Any]:
        return torch.load(self.checkpoint(step) / "optimizer.pt", weights_only=True)

    def checkpoint(self, step: int) -> Path:
        return self.directory / "checkpoints" / f"checkpoint-{step}"


def train(directory: Path, *overrides: str, recipe: str = "quickstart") -> Run:
    """`unirl train` with the small settings, in this process."""
    return command("train", directory, recipe, *SMALL, *overrides)


def command(name: str, directory: Path, recipe: str, *overrides: str) -> Run:
    """A command of `unirl` on exactly these overrides, in this process."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        exit_code = main([name, recipe, *_place(directory), *overrides])
    run = Run(exit_code, directory, output.getvalue(), errors.getvalue())
    for row in run.rows():
        for metric in row.keys() - {"kind", "rollout", "optimizer_step"}:
            assert _meaning(metric)
    return run


@functools.cache
def _meaning(metric: str) -> str:
    """Every metric of every run is in the catalogue."""
    return describe(metric).meaning


def start(directory: Path, *overrides: str, recipe: str = "quickstart") -> subprocess.Popen[str]:
    """`unirl train` in a process of its own; the caller waits for it."""
    words = [sys.executable, "-m", "unirl.train_diffusion", recipe, *_place(directory), *SMALL]
    return subprocess.Popen(
        [*words, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def compare_with_plan(run: Run) -> tuple[int, str]:
    """`unirl plan --compare` on what a run left: exit code and text."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = main(["plan", "--compare", str(run.directory)])
    return code, output.getvalue()


def _is_a_cost(name: str) -> bool:
    """Of times and moves, in a row of metrics; what was counted is none."""
    family, _, what = name.partition("/")
    counted = family == "progress" and not what.endswith("_seconds")
    return family in ("perf", "memory", "residency", "progress") and not counted


def _place(directory: Path) -> list[str]:
    return [f"output_dir={directory.parent}", f"run_name={directory.name}"]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Return once the condition holds; fail when the process ends or a minute passes first."""
    end = time.monotonic() + 60
    while not condition():
        if process.poll() is not None:
            raise AssertionError(f"ended early: {process.communicate()}")
        if time.monotonic() > end:
            process.kill()
            raise AssertionError(f"nothing happened: {process.communicate()}")
        time.sleep(0.01)


def wait_for_rows(directory: Path, process: subprocess.Popen[str]) -> Path:
    """The run's metrics.jsonl, once there is something in it."""
    metrics = directory / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, process)
    return metrics


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def contents(directory: Path) -> dict[str, bytes]:
    """All files but the log, by relative path."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "run.log"
    }


def write_prompts(path: Path, texts: list[str], **changes: Any) -> str:
    """A prompt file of red numbers on white; `changes` to the metadata, None removes a field."""
    metadata = {"text_color": "red", "background": "white", **changes}
    kept = {name: value for name, value in metadata.items() if value is not None}
    lines = [
        json.dumps(
            {
                "prompt": f'the number "{text}" in red on white',
                "metadata": {"text": text, **kept},
            }
        )
        for text in texts
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def assert_equal_trees(left: Any, right: Any) -> None:
    """Nested dicts and lists of tensors and numbers, equal bit for bit."""
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, Mapping):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal_trees(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal_trees(one, other)
    else:
        assert left == right


def assert_same_state(left: Run, right: Run, step: int) -> None:
    """Weights and optimizer of two runs' checkpoints are equal bit for bit."""
    assert_equal_trees(left.weights(step), right.weights(step))
    assert_equal_trees(left.optimizer(step), right.optimizer(step))
