"""What one rank holds of a network, and in which units it is gathered.

The network is sharded by the train stack's own code, over a process group that only pretends to
have other ranks, so the bytes are those of a run, padding included. Rank 0 holds the most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from unirl.config.schema import BackendConfig
from unirl.models.blocks import find_blocks
from unirl.train.sharded import GATHER_DTYPES, ShardedBackend, make_mesh


@dataclass(frozen=True)
class Unit:
    """What is gathered at a time: a block, or all that lies outside the blocks. Bytes of the whole,
    padded to equal shards."""

    gather_bytes: int
    """In the dtype it is gathered in."""
    trained_bytes: int
    """Of its trained parameters in float32, which is also what its gradients take."""


@dataclass(frozen=True)
class Layout:
    """A network over num_shards x num_replicas ranks. Bytes are those of rank 0."""

    num_shards: int
    num_replicas: int
    base_bytes: int
    """Frozen weights."""
    trained_bytes: int
    """Trained weights, float32."""
    network_bytes: int
    """The whole network as it is stored, without padding."""
    whole_trained_bytes: int
    """All trained weights, float32, without padding."""
    units: tuple[Unit, ...]
    """The blocks in order, then the root."""

    @property
    def gather_bytes(self) -> int:
        """All units together."""
        return sum(unit.gather_bytes for unit in self.units)

    @property
    def padded_trained_bytes(self) -> int:
        return sum(unit.trained_bytes for unit in self.units)

    def largest_gathered_bytes(self, prefetch: int) -> int:
        """The root and the largest run of blocks that are gathered together; 0 without shards."""
        if self.num_shards == 1:
            return 0
        *blocks, root = [unit.gather_bytes for unit in self.units]
        ahead = max(prefetch, 1)  # FSDP always gathers one block ahead in the backward
        runs = (sum(blocks[i : i + 1 + ahead]) for i in range(len(blocks)))
        return root + max(runs)


@contextmanager
def pretended_group(rank: int, world_size: int) -> Iterator[None]:
    """torch's default process group with this process as one rank; collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def lay_out(
    network: nn.Module, block_classes: Sequence[str], backend: BackendConfig, num_ranks: int
) -> Layout:
    """Shard `network` in place as backend.mesh says; needs a group of num_ranks."""
    blocks = find_blocks(network, block_classes)
    parameters = list(network.parameters())
    network_bytes = sum(map(_num_bytes, parameters))
    whole_trained_bytes = sum(_num_bytes(p) for p in parameters if p.requires_grad)
    if backend.mesh == "no_shard":
        num_shards, num_replicas = 1, num_ranks
    else:
        mesh = make_mesh(backend, num_ranks, torch.device("cpu"))
        ShardedBackend(network, blocks, mesh, backend)
        num_shards = mesh.size(mesh.ndim - 1)
        num_replicas = num_ranks // num_shards
    gather_dtype = GATHER_DTYPES[backend.gather_dtype]
    units = [_unit(b.parameters(), num_shards, gather_dtype) for b in blocks]
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    root = [p for p in network.parameters() if id(p) not in in_blocks]
    units.append(_unit(root, num_shards, gather_dtype))
    shards = list(network.parameters())
    return Layout(
        num_shards=num_shards,
        num_replicas=num_replicas,
        base_bytes=sum(_num_bytes(local_part(p)) for p in shards if not p.requires_grad),
        trained_bytes=sum(_num_bytes(local_part(p)) for p in shards if p.requires_grad),
        network_bytes=network_bytes,
        whole_trained_bytes=whole_trained_bytes,
        units=tuple(units),
    )


def local_part(tensor: Tensor) -> Tensor:
    """What lies on this rank of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _unit(
    parameters: Iterable[nn.Parameter], num_shards: int, gather_dtype: torch.dtype | None
) -> Unit:
    """Every shard is padded to the size of the first one, which is rank 0's."""
    gathered = trained = 0
    for parameter in parameters:
        local = local_part(parameter)
        gathered += num_shards * local.numel() * (gather_dtype or local.dtype).itemsize
        trained += num_shards * _num_bytes(local) if parameter.requires_grad else 0
    return Unit(gathered, trained)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
