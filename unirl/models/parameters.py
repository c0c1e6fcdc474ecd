"""Overwrite parameters by name, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from unirl.core.errors import ModelError


@torch.no_grad()
def copy_into(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into `parameters` in place.

    Raises ModelError, with nothing written, unless they fit.
    """
    require_fit(parameters, tensors)
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def require_fit(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Raise ModelError unless there is something to write and names and shapes match exactly."""
    missing = sorted(parameters.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - parameters.keys())
    misshapen = [
        f"{name}: {tuple(tensors[name].shape)} instead of {tuple(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in tensors and tensors[name].shape != parameter.shape
    ]
    if missing or unexpected or misshapen or not parameters:
        num_bound = len(parameters) - len(missing) - len(misshapen)
        raise ModelError(
            f"weights do not fit: bound {num_bound} of {len(parameters)} tensors, "
            f"missing {missing[:3]}, unexpected {unexpected[:3]}, wrong shape {misshapen[:3]}. "
            "Both sides need the same model.path, stack.lora.rank and stack.lora.target_modules."
        )
