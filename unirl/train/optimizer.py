"""AdamW and its learning-rate schedule from config."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from unirl.config.schema import OptimizerConfig, SchedulerConfig


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig
) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
    )


def learning_rate_factor(config: SchedulerConfig, step: int, total_steps: int) -> float:
    """What the base learning rate is multiplied by at optimizer step 0, 1, ..."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    span = max(1, (config.total_steps or total_steps) - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    match config.type:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))


def moment_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's tensors that live beside the parameters; none before the first step.

    AdamW's `step` counters are left out: they are CPU scalars and a copy on the GPU would cost a
    transfer per parameter and step.
    """
    return [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step" and isinstance(value, Tensor)
    ]


def moments_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """AdamW's two moments of a parameter; made, as zeros, before the first step."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return {name: state[name] for name in ("exp_avg", "exp_avg_sq")}


def set_optimizer_step(optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """What AdamW corrects the bias of young moments by."""
    for state in optimizer.state.values():
        state["step"] = torch.tensor(float(num_steps))
