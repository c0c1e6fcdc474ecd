"""How far each layer, in the run's precision, is from itself in float32.

A kernel that is wrong on some processor is wrong alike in sampling, replay and training, so no
ratio shows it. Here a layer gets the inputs that it just had once more, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

_KINDS = (nn.Linear, nn.modules.conv._ConvNd, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class LayerError:
    """Of one call of a layer."""

    name: str
    kind: str
    """Class name."""
    error: float
    """Norm of the difference to the float32 output, over the norm of that output."""


@contextmanager
def layer_errors(network: nn.Module) -> Iterator[list[LayerError]]:
    """While active, the layers of `network` add an entry for each of their calls.

    One layer's weights at a time are in float32, beside those of the network. Layers of quantised
    weights are left out.
    """
    found: list[LayerError] = []
    is_comparing = False

    def compare(
        name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        nonlocal is_comparing
        if is_comparing:
            return
        is_comparing = True
        try:
            error = _relative_error(output, _in_float32(layer, args, kwargs))
        finally:
            is_comparing = False
        found.append(LayerError(name, type(layer).__name__, error))

    def watch(name: str, layer: nn.Module) -> torch.utils.hooks.RemovableHandle:
        return layer.register_forward_hook(
            lambda layer, args, kwargs, output: compare(name, layer, args, kwargs, output),
            with_kwargs=True,
        )

    hooks = [watch(name, layer) for name, layer in network.named_modules() if _is_plain(layer)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _is_plain(layer: nn.Module) -> bool:
    parameters = list(layer.parameters())
    plain = (type(p.data) is Tensor and p.is_floating_point() for p in parameters)
    return isinstance(layer, _KINDS) and bool(parameters) and all(plain)


@torch.no_grad()
def _in_float32(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    weights = {name: parameter.float() for name, parameter in layer.named_parameters()}
    device = next(layer.parameters()).device.type
    with torch.autocast(device, enabled=False):
        inputs = tuple(map(_floats, args))
        return functional_call(layer, weights, inputs, {n: _floats(v) for n, v in kwargs.items()})


def _floats(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


@torch.no_grad()
def _relative_error(output: Tensor, exact: Tensor) -> float:
    difference = torch.linalg.vector_norm(output.float() - exact)
    return float(difference / torch.linalg.vector_norm(exact)) if bool(difference != 0) else 0.0
