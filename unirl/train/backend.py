"""How the trained network lies on the ranks: whole on each of them, or in shards (`train.sharded`).

The train stack is written once; what differs between one device, copies and shards is behind
`TrainBackend`: how gradients become those of all ranks, what part of a tensor lies here, and how a
whole one is read and written. Methods marked collective are entered by all ranks together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

REDUCE_BUCKET_BYTES = 128 * 2**20
"""Gradients of copies are reduced in flat buckets of about this size."""


class TrainBackend(ABC):
    """Where the weights, gradients and moments of the network are."""

    loss_scale: float
    """Factor on the loss that makes the reduced gradients a sum over ranks."""
    holds_whole: bool
    """Every tensor lies whole on this rank."""

    @abstractmethod
    def before_backward(self, *, is_last: bool) -> None:
        """Told before each backward of an optimizer step whether it is the step's last."""

    @abstractmethod
    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """After the last backward: make the gradients those of all ranks. Collective."""

    @abstractmethod
    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """[] global norm of the reduced gradients. Collective."""

    @abstractmethod
    def local(self, tensor: Tensor) -> Tensor:
        """The part that lies on this rank, sharing memory with it."""

    @abstractmethod
    def whole(self, tensor: Tensor) -> Tensor:
        """A copy of the whole tensor on the CPU. Collective."""

    @abstractmethod
    def share_of(self, whole: Tensor, like: Tensor) -> Tensor:
        """A tensor with the values of `whole`, laid out, placed and typed as `like`."""

    @abstractmethod
    def settle(self) -> None:
        """Free what was only gathered for a forward; before weights are moved, read or written."""

    @abstractmethod
    def gathered(self) -> AbstractContextManager[None]:
        """Keep the whole network on the device, for many forwards in a row. Collective."""


class WholeBackend(TrainBackend):
    """One device: everything is here."""

    loss_scale = 1.0
    holds_whole = True

    def before_backward(self, *, is_last: bool) -> None:
        return

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        return

    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True)

    def share_of(self, whole: Tensor, like: Tensor) -> Tensor:
        # A copy, because the memory of a tensor that torch.load made cannot be parked.
        return whole.to(device=like.device, dtype=like.dtype, copy=True)

    def settle(self) -> None:
        return

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext()


class CopiesBackend(WholeBackend):
    """`backend.mesh: no_shard`: a copy on each rank, gradients summed once per optimizer step."""

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        for bucket in _buckets([p.grad for p in parameters if p.grad is not None]):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            torch.distributed.all_reduce(flat)
            for gradient, summed in zip(
                bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True
            ):
                gradient.copy_(summed.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
        if size >= REDUCE_BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def clip_gradients(
    backend: TrainBackend, parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float
) -> None:
    """Scale gradients of global norm `norm` down to `max_norm`, each rank its own part."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = backend.local(parameter.grad)
            gradient.mul_(factor.to(gradient.device))


@torch.no_grad()
def write_share(backend: TrainBackend, parameter: Tensor, whole: Tensor) -> None:
    """Overwrite what lies here of a parameter, or of a tensor laid out like one, with its share of
    a whole tensor, in place."""
    share = backend.share_of(whole, like=parameter)
    backend.local(parameter).copy_(backend.local(share))
