"""The numbers of a window that fit into a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping


def _ratio_mean(metrics: Mapping[str, float]) -> str:
    """Clip ranges go down to 1e-5, so near 1 the deviation from it is printed instead of leading
    digits that never change."""
    deviation = metrics["train/ratio_mean"] - 1
    if deviation == 0:
        return "1"
    return f"1{deviation:+.1e}" if abs(deviation) < 1e-2 else f"{1 + deviation:.4f}"


def _ratio(metrics: Mapping[str, float]) -> str:
    return f"{_ratio_mean(metrics)}±{metrics['train/ratio_std']:.1e}"


Field = tuple[str, str, Callable[[Mapping[str, float]], str]]
"""Label, the metric that must be there, and how it is printed."""

_REWARD: Field = ("reward", "rollout/reward_mean", lambda m: f"{m['rollout/reward_mean']:.3f}")
_CLIP: Field = ("clip", "train/clip_fraction", lambda m: f"{m['train/clip_fraction']:.2f}")
_NORM: Field = ("gn", "train/grad_norm", lambda m: f"{m['train/grad_norm']:.3g}")
BAR_FIELDS = (_REWARD, _NORM, ("ratio", "train/ratio_mean", _ratio_mean), _CLIP)
LINE_FIELDS = (
    _REWARD,
    ("loss", "train/loss", lambda m: f"{m['train/loss']:.3g}"),
    _NORM,
    ("lr", "train/lr", lambda m: f"{m['train/lr']:.1e}"),
    ("ratio", "train/ratio_mean", _ratio),
    _CLIP,
)


def fields(metrics: Mapping[str, float], wanted: tuple[Field, ...]) -> Iterator[str]:
    """The fields whose metric was logged: an algorithm without a ratio shows none."""
    return (f"{label}={show(metrics)}" for label, name, show in wanted if name in metrics)
