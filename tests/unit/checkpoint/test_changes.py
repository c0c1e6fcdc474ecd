"""What a resume says about settings that differ from the saved ones."""

from __future__ import annotations

from typing import Any

import pytest
from builders import run_config

from unirl.checkpoint.changes import SAFE_KEYS, Changes, changes
from unirl.config.schema import RunConfig


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What makes it another run."""
    return list(told(before, after).others)


def told(before: dict[str, Any], after: dict[str, Any]) -> Changes:
    left, right = (run_config(c).model_dump(mode="json") for c in (before, after))
    return changes(left, right)


def test_equal_settings_and_neutral_ones_are_not_reported():
    assert changed({}, {}) == []
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
    assert changed({}, neutral) == []
    safe = told({}, neutral).safe
    assert "num_rollouts: 4 -> 99" in safe
    assert len(safe) == len(neutral)


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
    assert changed({key: old}, {key: new}) == [line]


def test_added_and_removed_blocks_are_reported():
    scorer = {"color": {"path": "color"}}
    lines = changed({}, {"reward.scorers": scorer})
    assert "reward.scorers.color.path: (not saved) -> color" in lines
    assert "stack.lora: None -> None" not in changed({"stack.lora": None}, {})
    assert "stack.lora.rank: (not saved) -> 2" in changed({"stack.lora": None}, {})


def test_the_length_of_the_run_counts_when_the_learning_rate_depends_on_it():
    schedule = {"stack.scheduler.type": "cosine"}
    longer = schedule | {"num_rollouts": 99}
    assert changed(schedule, longer) == ["num_rollouts: 4 -> 99"]
    fixed = {"stack.scheduler.total_steps": 50}
    assert changed(schedule | fixed, longer | fixed) == []


def test_the_length_of_the_run_counts_when_the_clip_range_falls_with_it():
    falling = {"algorithm.clip_schedule": "linear_decay"}
    assert changed(falling, falling | {"num_rollouts": 99}) == ["num_rollouts: 4 -> 99"]


def test_every_safe_key_is_a_key():
    assert set(SAFE_KEYS) <= RunConfig.model_fields.keys()
