"""Further sets of the trained weights: shadows that follow them, and teachers that stay as read.

Each holds one tensor per trained parameter, laid out as the parameter is here. To compute with a
set, its values and the parameters' are exchanged in place and exchanged back: the network, the
parameter objects and their memory stay the ones that everybody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightSet:
    """Values for the trained parameters, beside the present ones."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], local: Callable[[Tensor], Tensor]
    ) -> None:
        """Begins as a copy of the parameters. `local` gives the part of one that lies here."""
        self._parameters = parameters
        self._local = local
        self.tensors = {name: p.detach().clone() for name, p in parameters.items()}
        """By parameter, laid out as it is."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """The network has these values meanwhile. Not while gradients are under way, and not to be
        entered while it is entered."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for mine, present in self._pairs():
            kept = present.clone()
            present.copy_(mine)
            mine.copy_(kept)

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """values <- decay values + (1 - decay) parameters."""
        for mine, present in self._pairs():
            mine.lerp_(present, 1 - decay)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for name, parameter in self._parameters.items():
            # detach(), not data: a graph that still needs the old values must notice.
            yield self._local(self.tensors[name]), self._local(parameter.detach())
