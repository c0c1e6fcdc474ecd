"""Weight sync: bring the rollout engine's weights to the train stack's. Owned by neither side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from unirl.core.capabilities import SyncCapabilities
from unirl.weight_sync.payload import LoadReport, Probe, WeightPayload


class Versioned(Protocol):
    """Weights that can be told apart from later ones."""

    @property
    def weight_version(self) -> int: ...


class WeightSource(Versioned, Protocol):
    """The train stack's side."""

    @property
    def readable_while_parked(self) -> bool:
        """Whether `read_weights` works from the host copies, without the device."""
        ...

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
        """Read the trainer and load the engine, which must be awake."""


class StagedWeightSync(WeightSync):
    """A sync in two steps, so that trainer and engine never have to be on the device together."""

    reads_parked: bool
    """Whether `extract` can read a trainer that is parked, from its host copy."""

    @abstractmethod
    def extract(self) -> None:
        """Read the trainer's adapter, from the device or, where it is parked, from the host."""

    @abstractmethod
    def push(self) -> None:
        """Load what was read into the engine, which must be awake."""

    @abstractmethod
    def has_staged_adapter(self) -> bool:
        """Whether what was read last is of the trainer's present version."""


class SharedWeights(WeightSync):
    """The engine samples with the train stack's own parameters: nothing to do."""

    capabilities = SyncCapabilities(staged=False, adapters_only=False)

    def __init__(self, source: Versioned) -> None:
        self._source = source

    @property
    def published_version(self) -> int:
        return self._source.weight_version

    def sync(self) -> None:
        return
