"""What a finding is, and what it is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unirl.algorithms.surrogate import ClipRange
from unirl.config.schema import RunConfig
from unirl.core.capabilities import AlgorithmCapabilities
from unirl.train.examination import Level, Measured, Replay


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    value: str
    is_fine: bool
    sentence: str
    key: str = ""
    """What to change, as it is written in a recipe or an override; empty where nothing is."""

    @property
    def advice(self) -> str:
        """The sentence, and what to set."""
        return f"{self.sentence} Set {self.key}." if self.key else self.sentence


@dataclass(frozen=True)
class Limit:
    """What holds an update back."""

    key: str
    value: float
    """As the key has it, after its schedule."""
    log_ratio: float
    """The size of a log-ratio at which it acts."""


@dataclass(frozen=True)
class Case:
    """Everything that a finding is made of."""

    config: RunConfig
    capabilities: AlgorithmCapabilities
    measured: Measured

    @property
    def limit(self) -> Limit | None:
        """None for algorithms that hold nothing back by a ratio."""
        options, algorithm = self.capabilities.options, self.config.algorithm
        if "clip_range" in options:
            clip = ClipRange.of(algorithm, self.measured.progress).low
            return Limit("clip_range", clip, clip)
        if "kl_mask_threshold" in options:
            threshold = algorithm.kl_mask_threshold
            return Limit("kl_mask_threshold", threshold, math.sqrt(2 * threshold))
        return None

    @property
    def takes_rollout_log_probs(self) -> bool:
        """Whether ratios are taken to the engine's own log-probs."""
        options = self.capabilities.options
        return "old_log_prob" in options and self.config.algorithm.old_log_prob == "rollout"

    @property
    def replays(self) -> list[tuple[Level, Replay]]:
        return [(level, level.replay) for level in self.measured.levels if level.replay]
