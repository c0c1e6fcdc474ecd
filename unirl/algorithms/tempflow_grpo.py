"""TempFlow-GRPO (arXiv:2508.04324): branches of one path, weighed by the noise that parts them.

    weight = weight_scale std       the whole standard deviation of the branching step
    loss   = Flow-GRPO's with weight A in place of A

The branches are samples of the same start noise (sampling.samples_per_start above 1) that follow
the ODE but for one step each start draws (sampling.sde_steps.strategy=stratified). What they earn
differently they owe to that step alone: adv_group=start compares them with each other only.
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


class TempFlowGRPO(Algorithm[TransitionRows, RatioRows]):
    """Flow-GRPO on rows with weighed advantages."""

    capabilities = ALGORITHMS["tempflow_grpo"].capabilities

    def __init__(self, config: AlgorithmConfig, reward: DifferentiableReward) -> None:
        self._weight_scale = config.weight_scale
        self._grpo = FlowGRPO(config, reward)

    def shadows(self) -> Mapping[str, ShadowRule]:
        return self._grpo.shadows()

    def rows(self, scored: Sequence[ScoredRollout]) -> TransitionRows:
        rows = transition_rows(scored)
        weight = self._weight_scale * unit_step(rows).std.flatten()
        return replace(rows, advantages=rows.advantages * weight)

    def anchor(
        self, policy: Policy, rows: TransitionRows, slices: Sequence[Tensor]
    ) -> tuple[RatioRows, Mapping[str, float]]:
        return self._grpo.anchor(policy, rows, slices)

    def loss(self, policy: Policy, rows: RatioRows) -> RowLosses:
        return self._grpo.loss(policy, rows)

    def metrics(self, details: Mapping[str, Tensor]) -> Mapping[str, float]:
        return self._grpo.metrics(details)
