"""What a weight sync moves: tensors on the host, a version, and a probe that proves the result."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.core.types import Conditioning


@dataclass(frozen=True)
class Probe:
    """One input of the denoising network and the trainer's output for it."""

    latents: Tensor
    """[1, *latent] float32."""
    sigma: Tensor
    """[1] float32."""
    conditioning: Conditioning
    velocity: Tensor
    """[1, *latent] float32, with the weights of the payload."""
    base_velocity: Tensor
    """[1, *latent] float32, without the adapter; the same as `velocity` for full weights."""


@dataclass(frozen=True)
class WeightPayload:
    """Weights read from the train stack, copied to the host."""

    version: int
    """The train stack's weight version they were read at."""
    tensors: Mapping[str, Tensor]
    is_adapter: bool
    probe: Probe | None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@dataclass(frozen=True)
class LoadReport:
    """What the engine holds after a load, read back from its own memory."""

    num_bound: int
    checksum: str


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names and bytes, independent of the order of names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        # A copy: numpy would pin the storage it looks at, and the weights must stay movable.
        copy = tensors[name].detach().to("cpu", copy=True).contiguous()
        digest.update(copy.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
