"""Full-weight sync to an engine in the same process: read and load in one step."""

from __future__ import annotations

from unirl.config.catalog import SYNCS
from unirl.weight_sync.base import WeightSource, WeightSync, WeightTarget
from unirl.weight_sync.verify import verify_load


class LocalFullSync(WeightSync):
    """Copies every trained weight of the denoising network."""

    capabilities = SYNCS["full"].capabilities

    def __init__(self, source: WeightSource, target: WeightTarget, verify: bool) -> None:
        self._source = source
        self._target = target
        self._verify = verify
        self._published_version: int | None = None

    @property
    def published_version(self) -> int | None:
        return self._published_version

    def sync(self) -> None:
        if self._target.weight_version != self._source.weight_version:
            payload = self._source.read_weights(adapter=False, with_probe=self._verify)
            report = self._target.load_weights(payload)
            if self._verify:
                verify_load(payload, report, self._target)
        self._published_version = self._source.weight_version
