"""From a recipe's algorithm block to the algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unirl.algorithms.base import Algorithm, DifferentiableReward
from unirl.config import catalog
from unirl.config.components import import_component, is_own
from unirl.config.schema import AlgorithmConfig
from unirl.core.errors import RewardError
from unirl.core.types import PromptRecord


def no_reward(images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
    """For algorithms that are asked about rows and weights only, as in a plan."""
    raise RewardError("this algorithm was built without a reward to differentiate")


def make_algorithm(
    config: AlgorithmConfig, reward: DifferentiableReward = no_reward
) -> Algorithm[Any, Any]:
    """The algorithm that `config.path` names."""
    own = is_own(config.path)
    path = config.path if own else catalog.ALGORITHMS[config.path].path
    algorithm: Algorithm[Any, Any] = import_component(path)(config, reward)
    return algorithm
