"""LoRA sync to an engine in the same process."""

from __future__ import annotations

from unirl.config.catalog import SYNCS
from unirl.core.errors import WeightSyncError
from unirl.weight_sync.base import StagedWeightSync, WeightSource, WeightTarget
from unirl.weight_sync.payload import WeightPayload
from unirl.weight_sync.verify import verify_load


class LocalLoraSync(StagedWeightSync):
    """Copies the adapter over the host.

    What was read serves every push until the trainer's version changes, so evaluation chunks and
    rollouts of one window cost one read. A push of a version the engine already holds does nothing.
    """

    capabilities = SYNCS["lora"].capabilities

    def __init__(self, source: WeightSource, target: WeightTarget, verify: bool) -> None:
        self._source = source
        self._target = target
        self._verify = verify
        self.reads_parked = source.readable_while_parked
        self._staged: WeightPayload | None = None
        self._published_version: int | None = None

    @property
    def published_version(self) -> int | None:
        return self._published_version

    def has_staged_adapter(self) -> bool:
        return self._staged is not None and self._staged.version == self._source.weight_version

    def extract(self) -> None:
        self._staged = self._source.read_weights(adapter=True, with_probe=self._verify)

    def push(self) -> None:
        payload, current = self._staged, self._source.weight_version
        if payload is None or payload.version != current:
            held = "none" if payload is None else f"version {payload.version}"
            raise WeightSyncError(
                f"push of the adapter of version {current}, but {held} was extracted; call "
                "extract() first"
            )
        if self._target.weight_version != payload.version:
            report = self._target.load_weights(payload)
            if self._verify:
                verify_load(payload, report, self._target)
        self._published_version = payload.version

    def sync(self) -> None:
        if not self.has_staged_adapter():
            self.extract()
        self.push()
