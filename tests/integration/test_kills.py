"""A run that is killed again and again is the run that was never stopped, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import SMALL, Run, assert_same_state, train

SETTINGS = (
    "num_rollouts=6",
    "eval_interval=3",
    "save_interval=2",
    "save_keep=2",
    "load_dir=auto",
    "doctor=false",
)
KINDS = {
    "old adapter": ("diffusion/tiny/tiny_diffusion_nft", ("algorithm.old_decay_rate=0.3",)),
    "running average": (
        "diffusion/tiny/tiny_flow_grpo",
        ("algorithm.kl_coefficient=0.1", "algorithm.reference=ema", "algorithm.ema_decay=0.7"),
    ),
}


def train_under_kills(directory: Path, kind: str, seed: int, num_kills: int) -> tuple[int, Run]:
    """How many attempts were killed, and the run that came out."""
    recipe, settings = KINDS[kind]
    directory.parent.mkdir(exist_ok=True)
    place = [f"output_dir={directory.parent}", f"run_name={directory.name}"]
    words = [recipe, *place, *SMALL, *SETTINGS, *settings]
    done = subprocess.run(
        [sys.executable, "-m", "killed_runs", str(directory), str(num_kills), str(seed), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    output = (directory.parent / "output.txt").read_text()
    assert done.returncode == 0, done.stderr + output
    killed, exit_code = map(int, done.stdout.split())
    return killed, Run(exit_code, directory, output, "")


def evaluated(run: Run) -> dict[str, bytes]:
    """Scores and images of every evaluation, by file."""
    found = [*run.directory.glob("evaluations/*.jsonl"), *run.directory.glob("images/eval-*/*")]
    return {file.relative_to(run.directory).as_posix(): file.read_bytes() for file in found}


@pytest.mark.parametrize(("kind", "seed"), [(kind, n) for n, kind in enumerate(KINDS)])
def test_kills_at_random_moments_change_nothing(tmp_path: Path, kind: str, seed: int) -> None:
    recipe, settings = KINDS[kind]
    whole = train(tmp_path / "whole", *SETTINGS, *settings, recipe=recipe)
    assert whole.exit_code == 0, whole.errors
    num_killed, killed = train_under_kills(tmp_path / "killed" / "run", kind, seed, num_kills=6)
    assert num_killed >= 4
    assert killed.exit_code == 0, killed.output
    assert killed.numbers() == whole.numbers()
    assert_same_state(whole, killed, step=6)
    kept = [name for name in killed.checkpoints if "before-resume" not in name]
    assert kept == whole.checkpoints
    assert evaluated(killed) == evaluated(whole)
    best = {(run.directory / "checkpoints" / "best").resolve().name for run in (whole, killed)}
    assert len(best) == 1
