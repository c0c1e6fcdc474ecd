"""The phases that a run is in: told where they begin and end, read by the live display."""

from __future__ import annotations

import time
from collections.abc import Callable

WHOLE_WINDOW = "total"
"""The phase around those of a window."""


class Running:
    """Phases within phases; the display looks at them from a thread of its own."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._open: tuple[tuple[str, float], ...] = ()

    def begin(self, name: str) -> None:
        self._open = (*self._open, (name, self._now()))

    def end(self) -> None:
        """Of the phase that began last."""
        self._open = self._open[:-1]

    def phase(self) -> tuple[str, float] | None:
        """ "evaluate: rollout", and the seconds since the outer one began; None between phases."""
        inner = [(name, since) for name, since in self._open if name != WHOLE_WINDOW]
        if not inner:
            return None
        names = dict.fromkeys(name for name, _ in inner)
        return ": ".join(names), self._now() - inner[0][1]
