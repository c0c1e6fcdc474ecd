"""One component's move, told to directory and ledger as it goes.

The memory of what comes is counted from the start of its move, that of what leaves until its end.
"""

from __future__ import annotations

import time

from unirl.core.components import Movable, StartedMove
from unirl.residency.directory import Directory, State
from unirl.residency.ledger import Ledger
from unirl.residency.transition import ComponentMove


class AccountedMove:
    """A move that has started; a failure, now or later, leaves the component as it was."""

    def __init__(
        self, part: Movable, directory: Directory, ledger: Ledger, *, to_device: bool
    ) -> None:
        if to_device:
            ledger.require_room(part)
        self.part = part
        self.to_device = to_device
        self.is_open = True
        """Neither finished nor failed nor given up."""
        self.is_finished = False
        self._directory = directory
        self._ledger = ledger
        self._seconds = -time.perf_counter()
        # Asked first: what may be read of a part that is on the device may not be read off it.
        self._version = directory.host_version(part) if to_device else part.version()
        copy = not to_device and directory.needs_copy(part)
        self._source = directory.begin(part, to_device=to_device)
        try:
            self._started = self._start(copy)
        except BaseException:
            self._stay()
            raise

    def wait(self) -> None:
        """Return when its copies are complete."""
        self._started.wait()

    def finish(self) -> ComponentMove:
        try:
            moved = self._started.finish()
        except BaseException:
            self._stay()
            raise
        self.is_open, self.is_finished = False, True
        self._seconds += time.perf_counter()
        part, version = self.part, self._version
        if self._source is State.DROPPED:
            version = part.version()
        target = self._directory.finish(part, to_device=self.to_device)
        self._ledger.update(part)
        return ComponentMove(
            component=part.name,
            source=self._source,
            target=target,
            moved=moved,
            seconds=self._seconds,
            version=str(version),
            device_bytes=self._ledger.device_bytes,
            host_bytes=self._ledger.host_bytes,
        )

    def give_up(self) -> None:
        """Leave the component as it was, though nothing has failed."""
        try:
            self._started.give_up()
        finally:
            self._stay()

    def _start(self, copy: bool) -> StartedMove:
        if not self.to_device:
            return self.part.start_park(copy=copy)
        self._ledger.expect(self.part)
        return self.part.start_unpark()

    def _stay(self) -> None:
        self.is_open = False
        self._directory.give_up(self.part, self._source)
        self._ledger.update(self.part)  # its host copy may have been made before it failed
