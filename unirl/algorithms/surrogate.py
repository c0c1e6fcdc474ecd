"""The clipped surrogate of PPO (arXiv:1707.06347) on per-element log-ratios, and its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.config.schema import AlgorithmConfig


@dataclass(frozen=True)
class ClipRange:
    """The ratio is clipped to [1 - low, 1 + high]."""

    low: float
    high: float

    @classmethod
    def of(cls, config: AlgorithmConfig, progress: float) -> ClipRange:
        """The range at this part of the run, in [0, 1).

        linear_decay: factor 1 - p / 2; cosine_decay: factor (1 + cos(pi p)) / 2.
        """
        match config.clip_schedule:
            case "constant":
                factor = 1.0
            case "linear_decay":
                factor = 1 - progress / 2
            case "cosine_decay":
                factor = (1 + math.cos(math.pi * progress)) / 2
        low = config.clip_range
        return cls(low * factor, (config.clip_range_high or low) * factor)

    def loss(self, advantages: Tensor, ratio: Tensor) -> Tensor:
        """[r] max(-A ratio, -A clip(ratio)), for advantages and ratio [r]."""
        clipped = ratio.clamp(1 - self.low, 1 + self.high)
        return torch.maximum(-advantages * ratio, -advantages * clipped)

    def details(self, ratio: Tensor) -> dict[str, Tensor]:
        """[r] 1 where the ratio lies outside, float32: for `ratio_metrics`."""
        return {
            "clipped_high": (ratio > 1 + self.high).float(),
            "clipped_low": (ratio < 1 - self.low).float(),
        }


def ratio_metrics(details: Mapping[str, Tensor]) -> dict[str, float]:
    """From `log_ratio` [R] and what `ClipRange.details` gave."""
    log_ratio = details["log_ratio"]
    ratio = log_ratio.exp()
    high, low = details["clipped_high"].mean(), details["clipped_low"].mean()
    values = {
        "ratio_mean": ratio.mean(),
        "ratio_std": ratio.std(correction=0),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "log_ratio_abs_max": log_ratio.abs().max(),
        "approx_kl": 0.5 * (log_ratio**2).mean(),
        "clip_fraction": high + low,
        "clip_fraction_high": high,
        "clip_fraction_low": low,
    }
    return {name: float(value) for name, value in values.items()}
