"""What a run has cost so far: seconds, images and denoiser evaluations, `progress/*` of every row.

A checkpoint keeps them, so that a resumed run goes on counting where the checkpoint stood: what a
kill took back is not counted twice, nor is the time until somebody resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class Progress:
    """Counts from now on; the model is loaded by then.

    Images and denoiser evaluations are those of training windows alone: evaluations and the doctor
    are no part of what learning needs, and are repeated by a resume.
    """

    def __init__(self, num_devices: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_devices = num_devices
        self._clock = clock
        self._began = clock()
        self._before: Mapping[str, float] = {"wall_seconds": 0.0, "device_seconds": 0.0}
        self._images = 0.0
        self._denoiser_evaluations = 0.0

    def resume(self, saved: Mapping[str, float]) -> None:
        """Go on from the `state()` that a checkpoint kept, with the clock starting now."""
        self._began = self._clock()
        self._before = {name: saved[name] for name in self._before}
        self._images = saved["images"]
        self._denoiser_evaluations = saved["denoiser_evaluations"]

    def add_window(self, images: float, denoiser_evaluations: float) -> None:
        """What one training window took on all devices together."""
        self._images += images
        self._denoiser_evaluations += denoiser_evaluations

    def state(self) -> dict[str, float]:
        """So far; for a checkpoint."""
        seconds = self._clock() - self._began
        return {
            "wall_seconds": self._before["wall_seconds"] + seconds,
            "device_seconds": self._before["device_seconds"] + seconds * self._num_devices,
            "images": self._images,
            "denoiser_evaluations": self._denoiser_evaluations,
        }

    def metrics(self) -> dict[str, float]:
        """So far; for a row."""
        return {f"progress/{name}": value for name, value in self.state().items()}
