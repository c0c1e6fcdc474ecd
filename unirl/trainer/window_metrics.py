"""Metrics of one window, over the samples of all ranks, its rollouts and optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unirl.core.types import ScoredRollout, UpdateStats
from unirl.tracking.pooling import pool_metrics


def rollout_metrics(scored: Sequence[ScoredRollout]) -> dict[str, float]:
    """`rollout/*` of all samples that were scored; failed samples take no part."""
    valid = torch.cat([one.rewards.valid for one in scored])
    totals = torch.cat([one.rewards.total for one in scored])
    metrics = _spread("rollout/reward", totals[valid])
    for name in scored[0].rewards.components:
        values = torch.cat([one.rewards.components[name] for one in scored])
        metrics |= _spread(f"rollout/reward_{name}", values[valid])
    metrics |= _spread("rollout/advantage", torch.cat([one.advantages for one in scored])[valid])
    group_size = scored[0].request.samples_per_prompt
    groups = totals.view(-1, group_size)
    group_valid = valid.view(-1, group_size)[:, 0]
    is_flat = (groups == groups[:, :1]).all(dim=1)[group_valid]
    return metrics | {
        "rollout/num_samples": float(len(totals)),
        "rollout/group_count": float(len(groups)),
        "rollout/dropped_groups": float((~group_valid).sum()),
        "rollout/zero_std_group_ratio": float(is_flat.float().mean()),
    }


def train_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """`train/*`, pooled over the window's optimizer steps; skipped ones are counted."""
    pooled = pool_metrics([update.metrics for update in updates])
    pooled["skipped_steps"] = float(sum(update.skipped is not None for update in updates))
    return {f"train/{name}": value for name, value in pooled.items()}


def trained_forwards(costs: Mapping[str, float]) -> float:
    """Samples that this rank ran the denoiser on in a window, less those of the doctor's look."""
    names = ("perf/total_denoiser_forwards", "perf/doctor_denoiser_forwards")
    total, doctor = (costs.get(name, 0.0) for name in names)
    return total - doctor


def _spread(name: str, values: Tensor) -> dict[str, float]:
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_std": float(values.std(correction=0)),
        f"{name}_min": float(values.min()),
        f"{name}_max": float(values.max()),
    }
