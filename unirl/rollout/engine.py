"""The rollout engine contract: a request in, a rollout out, both plain values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from unirl.core.capabilities import EngineCapabilities
from unirl.core.components import Movable
from unirl.core.types import Rollout, RolloutRequest
from unirl.weight_sync.payload import LoadReport, Probe, WeightPayload


class RolloutEngine(ABC):
    """Samples with a copy of the policy. It is built asleep, its components off the device."""

    capabilities: EngineCapabilities

    @property
    @abstractmethod
    def parts(self) -> Sequence[Movable]:
        """What the residency planner moves; awake is an engine whose parts are all there."""

    @property
    def networks(self) -> Sequence[nn.Module]:
        """Denoising networks of its own in this process, for counting their use."""
        return ()

    @abstractmethod
    def generate(self, request: RolloutRequest) -> Rollout:
        """Sample B images.

        Raises ResidencyError when asleep, WeightSyncError when the engine does not hold
        request.weight_version.
        """


class SyncedEngine(RolloutEngine):
    """An engine with weights of its own, which a weight sync keeps equal to the trainer's."""

    @property
    @abstractmethod
    def weight_version(self) -> int | None:
        """The version last loaded; None before the first load or when it was lost."""

    @abstractmethod
    def load_weights(self, payload: WeightPayload) -> LoadReport:
        """Take an adapter or full weights; the engine must be awake.

        Raises WeightSyncError, with nothing changed, when names or shapes do not fit.
        """

    @abstractmethod
    def answer(self, probe: Probe) -> Tensor:
        """[1, *latent] the engine's own velocity on the probe, on the CPU."""
