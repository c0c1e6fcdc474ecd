"""The engine that samples with the train stack's own weights: no copy, no sync, nothing to park."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from unirl.config.catalog import ENGINES
from unirl.core.components import Movable
from unirl.core.errors import WeightSyncError
from unirl.core.types import Rollout, RolloutRequest
from unirl.models.base import DiffusionModel
from unirl.rollout.engine import RolloutEngine
from unirl.rollout.sampling import sample_with_model


class TrainsideEngine(RolloutEngine):
    """Has nothing to move; the weight version is always the train stack's."""

    capabilities = ENGINES["trainside"].capabilities

    def __init__(
        self,
        model: DiffusionModel,
        forward_batch_size: int,
        device: torch.device,
        train_version: Callable[[], int],
        gathered: Callable[[], AbstractContextManager[None]],
        note_progress: Callable[[RolloutRequest, float], None] = lambda request, num_samples: None,
    ) -> None:
        """`gathered` is entered around each generation, and `note_progress` told after each of its
        denoising steps how many samples of the request that makes."""
        self._model = model
        self._forward_batch_size = forward_batch_size
        self._device = device
        self._train_version = train_version
        self._gathered = gathered
        self._note_progress = note_progress

    @property
    def parts(self) -> Sequence[Movable]:
        return ()

    def generate(self, request: RolloutRequest) -> Rollout:
        held = self._train_version()
        if request.weight_version != held:
            raise WeightSyncError(
                f"asked to sample from weight version {request.weight_version}, holding {held}"
            )
        with self._gathered():
            return sample_with_model(
                self._model,
                request,
                self._forward_batch_size,
                self._device,
                partial(self._note_progress, request),
            )
