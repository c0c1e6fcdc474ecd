"""Moves the components of one role, all of them or none."""

from __future__ import annotations

import time
from collections.abc import Sequence

from unirl.core.components import Movable, Moved
from unirl.core.errors import ResidencyError
from unirl.residency.directory import Directory, State
from unirl.residency.ledger import Ledger
from unirl.residency.transition import ComponentMove


class Transaction:
    """One move after the other; where one fails, those before it are undone.

    Where undoing fails too, nobody knows any more what is where: the run is *poisoned*, and every
    later request is refused with the first cause.
    """

    def __init__(self, directory: Directory, ledger: Ledger) -> None:
        self._directory = directory
        self._ledger = ledger
        self._poison: str | None = None

    @property
    def is_sound(self) -> bool:
        return self._poison is None

    def require_sound(self) -> None:
        """Raise ResidencyError when an earlier move could not be undone."""
        if self._poison is not None:
            raise ResidencyError(
                f"weights are in an unknown place since a move failed and could not be undone "
                f"({self._poison}). Start the run again from its last checkpoint."
            )

    def run(self, parts: Sequence[Movable], *, to_device: bool) -> tuple[ComponentMove, ...]:
        """Move every part; raises the error of the part that failed, with the rest undone."""
        done: list[ComponentMove] = []
        for part in parts:
            try:
                done.append(self._move(part, to_device))
            except BaseException as error:
                if part.is_resident is to_device:  # it failed, and failed to restore itself
                    self._lose(part, f"{part.name}: {error}")
                self._undo(parts[: len(done)], to_device, error)
                raise
        return tuple(done)

    def _move(self, part: Movable, to_device: bool) -> ComponentMove:
        if to_device:
            self._ledger.require_room(part)
        # Asked first: what may be read of a part that is on the device may not be read off it.
        version = self._directory.host_version(part) if to_device else part.version()
        copy = not to_device and self._directory.needs_copy(part)
        source = self._directory.begin(part, to_device=to_device)
        started = time.perf_counter()
        try:
            moved: Moved = part.unpark() if to_device else part.park(copy=copy)
        except BaseException:
            self._directory.give_up(part, source)
            self._ledger.update(part)  # its host copy may have been made before it failed
            raise
        seconds = time.perf_counter() - started
        if source is State.DROPPED:
            version = part.version()
        target = self._directory.finish(part, to_device=to_device)
        self._ledger.update(part)
        return ComponentMove(
            component=part.name,
            source=source,
            target=target,
            moved=moved,
            seconds=seconds,
            version=str(version),
            device_bytes=self._ledger.device_bytes,
            host_bytes=self._ledger.host_bytes,
        )

    def _undo(self, parts: Sequence[Movable], to_device: bool, error: BaseException) -> None:
        for part in reversed(parts):
            try:
                self._move(part, not to_device)
            except BaseException as second:
                self._lose(part, f"{part.name}: {error}; undoing it: {second}")
                error.add_note(f"undoing the move of {part.name} failed too: {second}")

    def _lose(self, part: Movable, cause: str) -> None:
        self._directory.poison(part)
        self._poison = self._poison or cause
