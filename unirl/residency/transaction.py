"""Moves the components of one role, all of them or none."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.core.components import Movable
from unirl.core.errors import ResidencyError
from unirl.residency.accounted import AccountedMove
from unirl.residency.directory import Directory
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
                    self.lose(part, f"{part.name}: {error}")
                self.undo(parts[: len(done)], to_device, error)
                raise
        return tuple(done)

    def undo(self, parts: Sequence[Movable], to_device: bool, error: BaseException) -> None:
        """Move these parts back, the last first; `error` is why, and takes notes."""
        for part in reversed(parts):
            try:
                self._move(part, not to_device)
            except BaseException as second:
                self.lose(part, f"{part.name}: {error}; undoing it: {second}")
                error.add_note(f"undoing the move of {part.name} failed too: {second}")

    def lose(self, part: Movable, cause: str) -> None:
        """Nobody knows any more where the part is: poison the run."""
        self._directory.poison(part)
        self._poison = self._poison or cause

    def _move(self, part: Movable, to_device: bool) -> ComponentMove:
        return AccountedMove(part, self._directory, self._ledger, to_device=to_device).finish()
