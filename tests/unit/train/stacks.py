"""Train stacks after some windows of training, and all that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from builders import rollout_request, sample, scored, tiny_model, train_stack
from torch import Tensor

from unirl.core.types import ScoredRollout
from unirl.models.tiny import TinyModel
from unirl.train.optimizer import moment_tensors
from unirl.train.stack import TrainStack


def roll_out(model: TinyModel, **request: Any) -> ScoredRollout:
    return scored(sample(model, rollout_request(**request), forward_batch_size=4))


def trained(overrides: Mapping[str, Any], num_windows: int = 2, **model: Any) -> TrainStack:
    """A stack after some windows of on-policy training."""
    tiny = tiny_model(**model)
    stack = train_stack(tiny, overrides)
    for window in range(num_windows):
        stack.update([roll_out(tiny, key=f"window-{window}")])
    return stack


def state(stack: TrainStack) -> dict[str, Tensor]:
    moments = moment_tensors(stack.weights.optimizer)
    named = {f"moment-{i}": moment.clone() for i, moment in enumerate(moments)}
    return stack.weights.state_tensors(adapter_only=False) | named
