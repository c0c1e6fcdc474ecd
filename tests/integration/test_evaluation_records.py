"""What evaluations leave in the run directory, without and with an interruption between them."""

from __future__ import annotations

import shutil
from pathlib import Path

from runs import Run, contents, train

from unirl.tracking.evaluations import evaluation_file, evaluation_steps, read_evaluation
from unirl.trainer.evaluation import evaluation_metrics

EVALUATED = ("num_rollouts=3", "eval_interval=1", "save_interval=1", "logging.media_max_items=2")


def evaluations(run: Run) -> dict[str, bytes]:
    """Files of evaluations but those set aside."""
    files = contents(run.directory / "evaluations") | contents(run.directory / "images")
    return {name: data for name, data in files.items() if "before-resume" not in name}


def test_a_resumed_run_leaves_the_same_evaluations(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", *EVALUATED)
    assert evaluation_steps(whole.directory) == [0, 1, 2, 3]
    shutil.copytree(whole.directory, tmp_path / "resumed")
    load = f"load_dir={tmp_path / 'resumed' / 'checkpoints' / 'checkpoint-1'}"
    resumed = train(tmp_path / "resumed", *EVALUATED, load)
    assert resumed.exit_code == 0, resumed.errors
    assert len(evaluations(whole)) == 4 + 4 * 3 + 1
    assert evaluations(resumed) == evaluations(whole)
    aside = resumed.directory / "evaluations" / "before-resume-1"
    assert sorted(path.name for path in aside.iterdir()) == [
        f"eval-{step:06d}.jsonl" for step in (1, 2, 3)
    ]


def test_logged_means_follow_from_the_records(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "num_rollouts=1", "eval_interval=1")
    for row in run.rows("eval"):
        path = evaluation_file(run.directory, "eval", row["rollout"])
        means = evaluation_metrics("eval", read_evaluation(path))
        assert {name: row[name] for name in means} == means
