"""When a run is saved, and what a resume says about changed settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import run_config

from unirl.distributed.ranks import OneRank
from unirl.trainer.checkpoints import Checkpoints, changed_keys


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


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    left, right = (run_config(c).model_dump(mode="json") for c in (before, after))
    return changed_keys(left, right)


def test_equal_settings_and_neutral_ones_are_not_reported():
    assert changes({}, {}) == []
    neutral = {
        "run_name": "other",
        "output_dir": "elsewhere",
        "num_rollouts": 99,
        "train_resident": False,
        "rollout_resident": True,
        "reward_resident": False,
        "save_interval": 5,
        "load_dir": "x",
        "logging.media_scale": 3,
    }
    assert changes({}, neutral) == []


@pytest.mark.parametrize(
    ("key", "old", "new", "line"),
    [
        ("seed", 0, 1, "seed: 0 -> 1"),
        (
            "stack.optimizer.learning_rate",
            1e-3,
            1e-4,
            "stack.optimizer.learning_rate: 0.001 -> 0.0001",
        ),
        ("eval_num_prompts", 4, 8, "eval_num_prompts: 4 -> 8"),
        ("sampling.sde_steps.num_steps", 2, 1, "sampling.sde_steps.num_steps: 2 -> 1"),
    ],
)
def test_each_changed_setting_is_named_with_both_values(key, old, new, line):
    assert changes({key: old}, {key: new}) == [line]


def test_added_and_removed_blocks_are_reported():
    scorer = {"color": {"path": "color"}}
    lines = changes({}, {"reward.scorers": scorer})
    assert "reward.scorers.color.path: None -> color" in lines
    assert "stack.lora: None -> None" not in changes({"stack.lora": None}, {})
    assert "stack.lora.rank: None -> 2" in changes({"stack.lora": None}, {})


def test_the_length_of_the_run_counts_when_the_learning_rate_depends_on_it():
    schedule = {"stack.scheduler.type": "cosine"}
    longer = schedule | {"num_rollouts": 99}
    assert changes(schedule, longer) == ["num_rollouts: 4 -> 99"]
    fixed = {"stack.scheduler.total_steps": 50}
    assert changes(schedule | fixed, longer | fixed) == []
