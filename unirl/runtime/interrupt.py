"""Ctrl-C and SIGTERM end a run after the work in hand, with a checkpoint."""

from __future__ import annotations

import logging
import signal
from types import FrameType, TracebackType
from typing import Any, Self

logger = logging.getLogger("unirl.runtime")

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


class GracefulStop:
    """While active, the first signal asks the trainer to stop and the second one ends at once."""

    def __init__(self) -> None:
        self._requested = False
        self._previous: dict[int, Any] = {}

    def requested(self) -> bool:
        return self._requested

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
        logger.warning(
            "stopping: finishing the work in hand, then saving a checkpoint. "
            "Press Ctrl-C again to stop at once without one."
        )
