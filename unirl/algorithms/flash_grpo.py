"""FlashGRPO: one stochastic step per sample, and every step's gradient weighed alike.

    weight = 1 / |d log p / d velocity|, over its mean over the steps that are trained
    loss   = Flow-GRPO's with weight A in place of A

The log-prob of an early step depends far less on the velocity than that of a late one: by
sqrt(-dt) / g + g sqrt(-dt) (1 - s) / (2 s) with the reverse SDE's diffusion g = std / sqrt(-dt).
The weight takes that back. Steps are drawn with sampling.sde_steps.strategy=stratified: one per
sample, all steps equally often in a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from unirl.algorithms.anchors import RatioRows
from unirl.algorithms.base import Algorithm, DifferentiableReward, Policy, RowLosses, ShadowRule
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.algorithms.transitions import TransitionRows, transition_rows, unit_step
from unirl.config.catalog import ALGORITHMS
from unirl.config.schema import AlgorithmConfig
from unirl.core.types import ScoredRollout
from unirl.samplers.distinct import distinct_ids


class FlashGRPO(Algorithm[TransitionRows, RatioRows]):
    """Flow-GRPO on rows with weighed advantages."""

    capabilities = ALGORITHMS["flash_grpo"].capabilities

    def __init__(self, config: AlgorithmConfig, reward: DifferentiableReward) -> None:
        self._grpo = FlowGRPO(config, reward)

    def shadows(self) -> Mapping[str, ShadowRule]:
        return self._grpo.shadows()

    def rows(self, scored: Sequence[ScoredRollout]) -> TransitionRows:
        rows = transition_rows(scored)
        return replace(rows, advantages=rows.advantages * insensitivity(rows))

    def anchor(
        self, policy: Policy, rows: TransitionRows, slices: Sequence[Tensor]
    ) -> tuple[RatioRows, Mapping[str, float]]:
        return self._grpo.anchor(policy, rows, slices)

    def loss(self, policy: Policy, rows: RatioRows) -> RowLosses:
        return self._grpo.loss(policy, rows)

    def metrics(self, details: Mapping[str, Tensor]) -> Mapping[str, float]:
        return self._grpo.metrics(details)


def insensitivity(rows: TransitionRows) -> Tensor:
    """[R] std over |d mean / d velocity| of each row's step, over its mean over the steps.

    Each step counts once in that mean, however many rows it has: it is the same on every rank,
    since every group has the same steps.
    """
    step = unit_step(rows)
    weight = (step.std / step.mean.abs()).flatten()
    return weight / weight[distinct_ids(rows.step).first].mean()
