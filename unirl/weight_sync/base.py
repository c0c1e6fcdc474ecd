"""Weight sync: bring the rollout engine's weights to the train stack's. Owned by neither side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from unirl.core.capabilities import SyncCapabilities
from unirl.weight_sync.payload import LoadReport, Probe, WeightPayload


class WeightSource(Protocol):
    """The train stack's side."""

    @property
    def weight_version(self) -> int: ...

    def read_weights(self, *, adapter: bool, with_probe: bool) -> WeightPayload: ...


class WeightTarget(Protocol):
    """The engine's side."""

    @property
    def weight_version(self) -> int | None: ...

    def load_weights(self, payload: WeightPayload) -> LoadReport: ...

    def answer(self, probe: Probe) -> Tensor: ...


class WeightSync(ABC):
    """Keeps an engine at the version it should sample from."""

    capabilities: SyncCapabilities

    @property
    @abstractmethod
    def published_version(self) -> int | None:
        """The version the engine was last brought to; None before the first sync."""

    @abstractmethod
    def sync(self) -> None:
        """Read the trainer and load the engine; both must be on the device."""

    @abstractmethod
    def invalidate(self) -> None:
        """Forget what was read: the weights are about to change."""


class StagedWeightSync(WeightSync):
    """A sync in two steps, so that trainer and engine never have to be on the device together."""

    @abstractmethod
    def extract(self) -> None:
        """Read the trainer's adapter into a host cache; the trainer must be on the device."""

    @abstractmethod
    def push(self) -> None:
        """Load the cache into the engine, which must be awake; the cache survives."""

    @abstractmethod
    def has_staged_adapter(self) -> bool:
        """Whether an extracted adapter is cached and still current."""


class SharedWeights(WeightSync):
    """The engine samples with the train stack's own parameters: nothing to do."""

    capabilities = SyncCapabilities(staged=False, adapters_only=False)

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    @property
    def published_version(self) -> int:
        return self._source.weight_version

    def sync(self) -> None:
        return

    def invalidate(self) -> None:
        return
