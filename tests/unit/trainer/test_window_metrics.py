"""Pooling of a window's numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import rollout_request, sample, scored, tiny_model

from unirl.core.types import Rewards, ScoredRollout, UpdateStats
from unirl.trainer.window_metrics import rollout_metrics, train_metrics

ROLLOUT = sample(tiny_model(), rollout_request())


def rewarded(values: list[float], dropped: tuple[int, ...] = ()) -> ScoredRollout:
    """2 groups of 4 with these rewards; groups in `dropped` failed."""
    valid = torch.tensor([group not in dropped for group in (0, 1) for _ in range(4)])
    rewards = torch.tensor(values)
    one = scored(ROLLOUT, rewards, valid)
    return replace(one, rewards=Rewards(rewards, {"a": rewards * 2}, valid))


def test_rewards_are_pooled_over_all_rollouts_of_a_window():
    metrics = rollout_metrics([rewarded([0.0] * 4 + [1.0] * 4), rewarded([2.0] * 4 + [5.0] * 4)])
    assert metrics["rollout/reward_mean"] == 2
    assert (metrics["rollout/reward_min"], metrics["rollout/reward_max"]) == (0, 5)
    assert metrics["rollout/reward_a_mean"] == 4
    assert (metrics["rollout/num_samples"], metrics["rollout/group_count"]) == (16, 4)
    assert metrics["rollout/zero_std_group_ratio"] == 1


def test_failed_groups_take_no_part_in_any_mean():
    nan = float("nan")
    metrics = rollout_metrics([rewarded([nan] * 4 + [1.0, 2.0, 3.0, 4.0], dropped=(0,))])
    assert metrics["rollout/reward_mean"] == 2.5
    assert metrics["rollout/reward_a_mean"] == 5
    assert metrics["rollout/dropped_groups"] == 1
    assert metrics["rollout/zero_std_group_ratio"] == 0
    assert all(value == value for value in metrics.values())


def test_groups_without_signal_are_counted():
    metrics = rollout_metrics([rewarded([0.3] * 4 + [1.0, 2.0, 3.0, 4.0])])
    assert metrics["rollout/zero_std_group_ratio"] == 0.5


def test_updates_are_pooled_by_what_their_name_says():
    updates = [
        UpdateStats({"x_min": 0.9, "x_max": 1.1, "loss": 1.0, "y": 5.0}, skipped="why"),
        UpdateStats({"x_min": 0.8, "x_max": 1.2, "loss": 3.0}, skipped="why"),
    ]
    assert train_metrics(updates) == {
        "train/x_min": 0.8,
        "train/x_max": 1.2,
        "train/loss": pytest.approx(2),
        "train/skipped_steps": 2,
        "train/y": 5,
    }
