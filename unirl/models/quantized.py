"""Frozen weights in 8 bits, through diffusers' own quantisation (torchao's int8, a scale per row).

A real network is rounded while its files are read. A network without memory gets stand-ins of the
same size, so that a plan counts what a run has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unirl.core.errors import ModelError


def loading_words(quantization: str | None) -> dict[str, Any]:
    """Arguments of `from_pretrained` for the key model.quantization.

    Raises ModelError when torchao is not installed.
    """
    if quantization is None:
        return {}
    try:
        from torchao.quantization import Int8WeightOnlyConfig
    except ImportError as error:
        raise ModelError(
            f"model.quantization={quantization} needs torchao: pip install 'unirl[quantized]'."
        ) from error
    from diffusers import TorchAoConfig

    return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}


def as_int8(network: Any) -> Any:
    """A network on the meta device with every linear layer's weight as a run stores it."""
    for module in network.modules():
        for name, layer in list(module.named_children()):
            if type(layer) is nn.Linear:
                setattr(module, name, Int8Linear(layer))
    return network.eval().requires_grad_(False)


class Int8Linear(nn.Linear):
    """In plans: a linear layer whose weight takes a byte per value, a scale and a zero per row."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            device="meta",
            dtype=layer.weight.dtype,
        )
        rows, shape = layer.out_features, layer.weight.shape
        self.weight = _without_grad(torch.empty(shape, dtype=torch.int8, device="meta"))
        self.scale = _without_grad(torch.empty(rows, 1, dtype=torch.float32, device="meta"))
        self.zero_point = _without_grad(torch.empty(rows, 1, dtype=torch.int8, device="meta"))

    def forward(self, input: Tensor) -> Tensor:
        # The kernel of the CPU and of most GPUs: the weight is widened for the product.
        return F.linear(input, self.weight.to(input.dtype), self.bias)


def _without_grad(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
