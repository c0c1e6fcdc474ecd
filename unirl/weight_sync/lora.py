"""LoRA sync to an engine in the same process."""

from __future__ import annotations

from unirl.config.catalog import SYNCS
from unirl.core.errors import WeightSyncError
from unirl.weight_sync.base import StagedWeightSync, WeightSource, WeightTarget
from unirl.weight_sync.payload import WeightPayload
from unirl.weight_sync.verify import verify_load


class LocalLoraSync(StagedWeightSync):
    """Copies the adapter through a host cache.

    The cache is valid until `invalidate`, so several pushes (evaluation chunks, rollouts of one
    window) cost one read. A push of a version the engine already holds does nothing.
    """

    capabilities = SYNCS["lora"].capabilities

    def __init__(self, source: WeightSource, target: WeightTarget, verify: bool) -> None:
        self._source = source
        self._target = target
        self._verify = verify
        self._staged: WeightPayload | None = None
        self._published_version: int | None = None

    @property
    def published_version(self) -> int | None:
        return self._published_version

    def has_staged_adapter(self) -> bool:
        return self._staged is not None

    def extract(self) -> None:
        self._staged = self._source.read_weights(adapter=True, with_probe=self._verify)

    def push(self) -> None:
        if self._staged is None:
            raise WeightSyncError("push without an extracted adapter; call extract() first")
        payload = self._staged
        if self._target.weight_version != payload.version:
            report = self._target.load_weights(payload)
            if self._verify:
                verify_load(payload, report, self._target)
        self._published_version = payload.version

    def sync(self) -> None:
        if self._staged is None:
            self.extract()
        self.push()

    def invalidate(self) -> None:
        self._staged = None
