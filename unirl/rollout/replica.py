"""An engine with its own copy of the model in the same process: the embedded stand-in for a server.

It sleeps, wakes and takes weights through a push exactly as an external engine does, so the whole
colocated loop runs and is tested without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from unirl.config.catalog import ENGINES
from unirl.core.components import (
    FROZEN,
    NETWORK_BASE,
    Component,
    Movable,
    TensorComponent,
)
from unirl.core.errors import ModelError, ResidencyError, WeightSyncError
from unirl.core.types import Rollout, RolloutRequest
from unirl.memory.hostmem import HostArena
from unirl.memory.movers import RoleWeights, module_components
from unirl.models.base import DiffusionModel
from unirl.models.lora import adapter_parameters
from unirl.models.parameters import copy_into
from unirl.rollout.engine import SyncedEngine
from unirl.rollout.sampling import sample_with_model
from unirl.weight_sync.payload import LoadReport, Probe, WeightPayload, checksum


def replica_components(
    model: DiffusionModel, num_loads: Callable[[], int], *, shares_base: bool
) -> list[Component]:
    """Frozen base unless it is shared, what a push writes, buffers, text encoders and decoder."""
    network = model.network
    adapter = adapter_parameters(network)
    base = [p for name, p in network.named_parameters() if name not in adapter]
    written = list(adapter.values()) if adapter else base
    components: list[Component] = [
        TensorComponent(
            "rollout.adapter" if adapter else "rollout.weights",
            lambda: written,
            num_loads,
            written_by="push",
        ),
        TensorComponent(
            "rollout.buffers", lambda: list(network.buffers()), lambda: None, written_by="forward"
        ),
    ]
    if adapter and not shares_base:
        base_component = TensorComponent(
            "rollout.base", lambda: base, lambda: FROZEN, host_key=NETWORK_BASE
        )
        components.insert(0, base_component)
    for name, module in model.frozen_modules.items():
        components += module_components(f"rollout.{name}", module)
    return components


class ReplicaEngine(SyncedEngine):
    """Keeps a pushed adapter through sleep: it is parked with the other weights."""

    capabilities = ENGINES["replica"].capabilities

    def __init__(
        self,
        model: DiffusionModel,
        forward_batch_size: int,
        device: torch.device,
        host: HostArena,
        shared_base: Movable | None,
    ) -> None:
        """`model` is this engine's own, with encoders, on `device`, with the adapter attached.

        `shared_base`: the train stack's component whose memory the network's frozen weights are;
        None when they are the engine's own.
        """
        self._model = model
        self._forward_batch_size = forward_batch_size
        self._device = device
        self._weight_version: int | None = None
        self._num_loads = 0
        components = replica_components(
            model, lambda: self._num_loads, shares_base=shared_base is not None
        )
        self._weights = RoleWeights(components, host)
        self._shared = [] if shared_base is None else [shared_base]
        for part in self._weights.parts:
            part.park(copy=True)

    @property
    def parts(self) -> Sequence[Movable]:
        return [*self._shared, *self._weights.parts]

    @property
    def networks(self) -> Sequence[nn.Module]:
        return [self._model.network]

    @property
    def weight_version(self) -> int | None:
        return self._weight_version

    def load_weights(self, payload: WeightPayload) -> LoadReport:
        self._require_awake("load weights")
        network = self._model.network
        held = (
            adapter_parameters(network) if payload.is_adapter else dict(network.named_parameters())
        )
        try:
            copy_into(held, payload.tensors)
        except ModelError as error:
            raise WeightSyncError(f"push to the replica engine: {error}") from error
        self._num_loads += 1
        self._weight_version = payload.version
        return LoadReport(num_bound=len(held), checksum=checksum(held))

    @torch.no_grad()
    def answer(self, probe: Probe) -> Tensor:
        self._require_awake("answer a probe")
        return self._model.velocity(
            probe.latents.to(self._device),
            probe.sigma.to(self._device),
            probe.conditioning.to(self._device),
        ).cpu()

    def generate(self, request: RolloutRequest) -> Rollout:
        self._require_awake("generate")
        if request.weight_version != self._weight_version:
            raise WeightSyncError(
                f"asked to sample from weight version {request.weight_version}, "
                f"holding {self._weight_version}"
            )
        return sample_with_model(self._model, request, self._forward_batch_size, self._device)

    def _require_awake(self, action: str) -> None:
        self._weights.require_resident("the replica engine", action)
        for part in self._shared:
            if not part.is_resident:
                raise ResidencyError(
                    f"the replica engine was asked to {action} while {part.name}, which it shares, "
                    "is parked"
                )
