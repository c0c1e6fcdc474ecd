"""How many samples the denoising network was run on: the cost of a run in the field's own unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


class ForwardCount:
    """Counts samples, so that a batch of 8 and guidance on it count 16.

    Recomputing activations in a backward is not counted; a backward counts where the forward kept a
    graph.
    """

    def __init__(self, networks: Iterable[nn.Module]) -> None:
        """Looks at each distinct network from now on."""
        self._forwards = 0
        self._backwards = 0
        for network in {id(network): network for network in networks}.values():
            network.register_forward_hook(self._count)

    def totals(self) -> Mapping[str, int]:
        """So far."""
        return {"denoiser_forwards": self._forwards, "denoiser_backwards": self._backwards}

    def _count(self, network: nn.Module, inputs: Any, output: Any) -> None:
        velocity = output[0] if isinstance(output, tuple) else output
        self._forwards += len(velocity)
        if torch.is_grad_enabled():
            self._backwards += len(velocity)
