"""The clipped surrogate, its schedule and the metrics of ratios."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from builders import run_config

from unirl.algorithms.surrogate import ClipRange, ratio_metrics


def clip_range(progress: float = 0.0, **overrides: Any) -> ClipRange:
    config = run_config({f"algorithm.{key}": value for key, value in overrides.items()}).algorithm
    return ClipRange.of(config, progress)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", (1.0, 1.0, 1.0)),
        ("linear_decay", (1.0, 0.75, 0.625)),
        ("cosine_decay", (1.0, 0.5, 0.5 - math.sqrt(0.5) / 2)),
    ],
)
def test_the_range_follows_its_schedule(schedule, factors):
    for progress, factor in zip((0.0, 0.5, 0.75), factors, strict=True):
        found = clip_range(progress, clip_range=0.1, clip_range_high=0.2, clip_schedule=schedule)
        assert (found.low, found.high) == pytest.approx((0.1 * factor, 0.2 * factor))


def test_without_a_range_of_its_own_the_upper_side_has_the_lower_ones():
    assert clip_range(clip_range=0.1) == ClipRange(0.1, 0.1)


def test_the_loss_is_the_worse_of_the_plain_and_the_clipped_one():
    ratio = torch.tensor([0.5, 0.95, 1.0, 1.15, 1.5])
    clip = ClipRange(0.1, 0.2)
    good, bad = clip.loss(torch.ones(5), ratio), clip.loss(-torch.ones(5), ratio)
    torch.testing.assert_close(good, -torch.tensor([0.5, 0.95, 1.0, 1.15, 1.2]))
    torch.testing.assert_close(bad, torch.tensor([0.9, 0.95, 1.0, 1.15, 1.5]))


def test_metrics_are_those_of_the_ratios():
    log_ratio = torch.tensor([-0.3, 0.0, 0.1, 0.4])
    details = {"log_ratio": log_ratio, **ClipRange(0.1, 0.2).details(log_ratio.exp())}
    metrics, ratio = ratio_metrics(details), log_ratio.double().exp()
    assert metrics == pytest.approx(
        {
            "ratio_mean": float(ratio.mean()),
            "ratio_std": float(ratio.std(correction=0)),
            "ratio_min": math.exp(-0.3),
            "ratio_max": math.exp(0.4),
            "log_ratio_abs_max": 0.4,
            "approx_kl": (0.09 + 0.01 + 0.16) / 8,
            "clip_fraction": 0.5,
            "clip_fraction_high": 0.25,
            "clip_fraction_low": 0.25,
        },
        rel=1e-5,
    )
