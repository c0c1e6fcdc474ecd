"""When a run is saved, which checkpoints stay, and what the best one is."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from builders import run_config

from unirl.checkpoint.state import TrainerState
from unirl.checkpoint.store import CheckpointStore
from unirl.core.errors import ConfigError
from unirl.distributed.ranks import OneRank
from unirl.trainer.checkpoints import Checkpoints, best_step, keep_the_best


def checkpoints(**overrides: Any) -> Checkpoints:
    config = run_config(overrides)
    return Checkpoints(config, None, Path("nowhere"), None, OneRank())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("interval", "total", "expected"),
    [(0, 6, []), (2, 6, [2, 4, 6]), (4, 6, [4, 6]), (100, 6, [6])],
)
def test_a_save_is_due_every_interval_and_at_the_end(interval, total, expected):
    schedule = checkpoints(save_interval=interval, num_rollouts=total)
    assert [done for done in range(1, total + 1) if schedule.is_due(done)] == expected


def test_a_fresh_run_starts_at_zero():
    assert checkpoints().restore() == 0


def evaluated_store(folder: Path, values: dict[int, float | None]) -> CheckpointStore:
    """Checkpoints by step with the held-out reward they had, None for those not evaluated."""
    store = CheckpointStore(folder)
    saved = run_config({"eval_interval": 1}).model_dump(mode="json")
    for step, value in values.items():
        metrics = {} if value is None else {"eval/reward_mean": value}
        state = TrainerState(step, step, None, saved, evaluation=metrics)

        def write(path: Path, state: TrainerState = state) -> None:
            (path / "trainer_state.json").write_text(json.dumps(asdict(state)))

        store.save(step, write)
    return store


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ({1: 0.2, 2: 0.9, 3: 0.4}, 2),
        ({1: 0.9, 2: 0.9, 3: 0.4}, 2),
        ({1: None, 2: None}, None),
        ({1: None, 2: -3.0, 3: None}, 2),
    ],
)
def test_the_best_checkpoint_is_the_one_with_the_highest_evaluation(tmp_path, values, best):
    store = evaluated_store(tmp_path, values)
    assert best_step(store, run_config({"eval_interval": 1}), {}) == best


def test_checkpoints_that_were_evaluated_otherwise_are_no_candidates(tmp_path):
    store = evaluated_store(tmp_path, {1: 0.9, 2: 0.8})
    assert best_step(store, run_config({"eval_interval": 1, "seed": 7}), {}) is None
    longer = run_config({"eval_interval": 1, "stack.optimizer.learning_rate": 1.0})
    assert best_step(store, longer, {}) == 1


def test_the_newest_and_the_best_one_stay_and_are_marked(tmp_path):
    store = evaluated_store(tmp_path, {1: 0.1, 2: 0.9, 3: 0.4, 4: None, 5: 0.3})
    keep_the_best(store, run_config({"eval_interval": 1, "save_keep": 2}), {})
    assert store.steps() == [5, 4, 2]
    assert (tmp_path / "best").resolve().name == "checkpoint-2"
    keep_the_best(store, run_config({"save_keep": 1, "keep_best": None}), {})
    assert store.steps() == [5]
    assert not (tmp_path / "best").exists()


def test_a_metric_that_no_evaluation_gives_is_refused_at_the_first_one():
    kept = checkpoints(keep_best="eval/judge_taste_mean", save_interval=1)
    with pytest.raises(ConfigError, match=r"keep_best=eval/judge_taste_mean.*eval/reward_mean"):
        kept.evaluated(0, {"eval/reward_mean": 0.5})
    checkpoints(keep_best="eval/judge_taste_mean").evaluated(0, {"eval/reward_mean": 0.5})
