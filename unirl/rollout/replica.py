"""An engine with its own copy of the model in the same process: the embedded stand-in for a server.

It sleeps, wakes and takes weights through a push exactly as an external engine does, so the whole
colocated loop runs and is tested without one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.config.catalog import ENGINES
from unirl.core.components import FROZEN, Component, Moved, TensorComponent
from unirl.core.errors import ModelError, ResidencyError, WeightSyncError
from unirl.core.types import Rollout, RolloutRequest
from unirl.memory.movers import ComponentMover, module_components
from unirl.models.base import DiffusionModel
from unirl.models.lora import adapter_parameters
from unirl.models.parameters import copy_into
from unirl.rollout.engine import SyncedEngine
from unirl.rollout.sampling import sample_with_model
from unirl.weight_sync.payload import LoadReport, Probe, WeightPayload, checksum


class ReplicaEngine(SyncedEngine):
    """Keeps a pushed adapter through sleep: it is parked with the other weights."""

    capabilities = ENGINES["replica"].capabilities

    def __init__(
        self, model: DiffusionModel, forward_batch_size: int, device: torch.device
    ) -> None:
        """`model` is this engine's own, with encoders, on `device`, with the adapter attached."""
        self._model = model
        self._forward_batch_size = forward_batch_size
        self._device = device
        self._weight_version: int | None = None
        self._num_loads = 0
        self._mover = ComponentMover(self._components())
        self._mover.offload()
        self._is_awake = False

    def _components(self) -> list[Component]:
        network = self._model.network
        adapter = adapter_parameters(network)
        base = [p for name, p in network.named_parameters() if name not in adapter]
        written, frozen = ([*adapter.values()], base) if adapter else (base, [])
        components: list[Component] = [
            TensorComponent("rollout.base", lambda: frozen, lambda: FROZEN),
            TensorComponent("rollout.synced", lambda: written, lambda: self._num_loads),
            TensorComponent("rollout.buffers", lambda: list(network.buffers()), lambda: None),
        ]
        for name, module in self._model.frozen_modules.items():
            components += module_components(f"rollout.{name}", module)
        return components

    @property
    def weight_version(self) -> int | None:
        return self._weight_version

    def wake_up(self) -> Moved:
        moved = self._mover.onload()
        self._is_awake = True
        return moved

    def sleep(self) -> Moved:
        moved = self._mover.offload()
        self._is_awake = False
        return moved

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
        if not self._is_awake:
            raise ResidencyError(f"the replica engine was asked to {action} while asleep")
