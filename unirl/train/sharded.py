"""The network in shards over the ranks, with torch's FSDP2 (`torch.distributed.fsdp.fully_shard`).

Each block of the family's block list is gathered for its own forward and backward and freed again;
what lies outside the blocks forms one more unit. Between forwards every parameter is a DTensor
whose local part is all that this rank holds, so parking a role moves exactly that part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from unirl.config.schema import BackendConfig
from unirl.train.backend import TrainBackend

GATHER_DTYPES = {"stored": None, "bf16": torch.bfloat16}


def make_mesh(config: BackendConfig, world_size: int, device: torch.device) -> DeviceMesh:
    """1-D over all ranks, or replicas x shards with neighbouring ranks in one shard group."""
    if config.mesh == "full":
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    assert config.shard_size is not None
    return init_device_mesh(
        device.type,
        (world_size // config.shard_size, config.shard_size),
        mesh_dim_names=("replicate", "shard"),
    )


class ShardedBackend(TrainBackend):
    """Shards a network in place; parameters on the meta device stay there, to be filled later."""

    holds_whole = False

    def __init__(
        self,
        network: nn.Module,
        blocks: Sequence[nn.Module],
        mesh: DeviceMesh,
        config: BackendConfig,
    ) -> None:
        """`config.defer_reduce` is decided: null counts as false."""
        # fully_shard averages over all ranks of the mesh.
        self.loss_scale = float(mesh.size())
        self._defer_reduce = config.defer_reduce is True
        self._network = network
        policy = MixedPrecisionPolicy(
            param_dtype=GATHER_DTYPES[config.gather_dtype],
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        units = [*blocks, network]
        for unit in units:
            fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        self._units: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
        for index, block in enumerate(self._units[:-1]):
            later = self._units[index + 1 : -1][: config.prefetch]
            earlier = self._units[:index][::-1][: config.prefetch]
            block.set_modules_to_forward_prefetch(later)
            block.set_modules_to_backward_prefetch(earlier)

    def before_backward(self, *, is_last: bool) -> None:
        self._root.set_requires_gradient_sync(is_last or not self._defer_reduce)

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing left to do: the last backward reduced them."""

    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor

    def whole(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole.to("cpu", copy=True)

    def share_of(self, whole: Tensor, like: Tensor) -> Tensor:
        whole = whole.to(device=like.device, dtype=like.dtype, copy=True)
        if not isinstance(like, DTensor):
            return whole
        # src_data_rank=None: every rank has the whole one, so nothing is sent.
        share = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
        return DTensor.from_local(
            share.to_local().clone(),
            like.device_mesh,
            like.placements,
            shape=like.shape,
            stride=like.stride(),
        )

    def settle(self) -> None:
        for unit in self._units:
            unit.reshard()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        self._root.set_reshard_after_forward(False)
        try:
            for unit in self._units:
                unit.unshard()
            yield
        finally:
            self._root.set_reshard_after_forward(True)
            self.settle()

    @property
    def _root(self) -> FSDPModule:
        return self._units[-1]
