"""Ctrl-C, SIGTERM, SIGHUP and max_hours end a run after the phase in hand, with a checkpoint."""

from __future__ import annotations

import logging
import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

import psutil

logger = logging.getLogger("unirl.runtime")

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, which also ends a shell's loop over runs."""
TERMINATED = 143
"""After SIGTERM, as clusters send it before they take the machine: 128 + SIGTERM."""
HUNG_UP = 129
"""After SIGHUP, when the terminal is closed or the connection lost: 128 + SIGHUP."""
OUT_OF_TIME = 124
"""After max_hours, as the command `timeout` has it."""
CONDITION_MET = 4
"""After a run whose evaluations met a condition of stop_on, which ended it or came at its end."""


class GracefulStop:
    """While active, the first signal asks the trainer to stop and the second one ends at once."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self._deadline: float | None = None
        self._previous: dict[int, Any] = {}

    def limit(self, hours: float | None) -> None:
        """Ask to stop, too, when this process is that old. None: never."""
        if hours is not None:
            self._deadline = psutil.Process().create_time() + 3600 * hours

    def requested(self) -> bool:
        return self._signal is not None or self._is_late()

    @property
    def exit_code(self) -> int:
        """Of a run that was stopped; by another rank's signal where this one had none."""
        if self._signal is not None:
            return 128 + self._signal
        return OUT_OF_TIME if self._is_late() else TERMINATED

    @property
    def reason(self) -> str:
        """Why the run was stopped."""
        if self._signal == signal.SIGINT:
            return "Ctrl-C"
        if self._signal is not None:
            return signal.Signals(self._signal).name
        return "max_hours" if self._is_late() else "a signal to another rank"

    def _is_late(self) -> bool:
        return self._deadline is not None and time.time() > self._deadline

    def __enter__(self) -> Self:
        for number in stop_signals():
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
        if self._signal is None:
            self._signal = number
            logger.warning(
                "stopping: finishing the phase in hand, then saving a checkpoint. "
                "Press Ctrl-C again to stop at once without one."
            )
        elif number != signal.SIGHUP:  # of a closed terminal kernel and shell send one each
            raise KeyboardInterrupt


def stop_signals() -> list[signal.Signals]:
    """What asks a run to stop; under nohup SIGHUP stays ignored."""
    asked = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        asked.append(signal.SIGHUP)
    return asked
