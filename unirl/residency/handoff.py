"""Roles leave while another comes, with copies both ways at the same time.

One after the other needs no more memory than the larger side, and uses half of the link. A handoff
holds both sides until every copy is complete, and only then frees what leaves: where the device has
the memory, that is up to `plan.DUPLEX` times faster. Nothing is freed before all has arrived, so a
handoff that fails leaves everything where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from unirl.core.components import Movable, Parking
from unirl.residency.accounted import AccountedMove
from unirl.residency.directory import Directory
from unirl.residency.ledger import Ledger
from unirl.residency.transaction import Transaction
from unirl.residency.transition import ComponentMove


@dataclass(frozen=True)
class Handed:
    """What one handoff moved."""

    left: tuple[ComponentMove, ...]
    """In order; their `device_bytes` are those while both sides were there. The seconds of the
    whole handoff are divided among them by their bytes, and so they are among those that came."""
    came: tuple[ComponentMove, ...]
    """In order; their `device_bytes` are those afterwards."""
    allocated_bytes: int | None
    """What the device said while both sides were there."""


class OverlappedHandoff:
    """Exchanges components whose both sides fit on the device together."""

    def __init__(
        self,
        directory: Directory,
        ledger: Ledger,
        transaction: Transaction,
        budget_bytes: int | None,
    ) -> None:
        """`budget_bytes`: what components may take while both sides are there; None: release
        before acquire, always."""
        self._directory = directory
        self._ledger = ledger
        self._transaction = transaction
        self._budget_bytes = budget_bytes

    @property
    def is_asked_for(self) -> bool:
        return self._budget_bytes is not None

    def pays(self, leaving: Sequence[Movable], coming: Sequence[Movable]) -> bool:
        """Whether there is something to copy both ways, and room for both sides."""
        goes = any(part.num_bytes() and self._directory.needs_copy(part) for part in leaving)
        comes = any(part.parking is Parking.COPY and part.num_bytes() for part in coming)
        has_room = self._ledger.has_room(coming, self._budget_bytes)
        return self.is_asked_for and goes and comes and has_room

    def run(
        self,
        leaving: Sequence[Movable],
        coming: Sequence[Movable],
        allocated_bytes: Callable[[], int | None],
    ) -> Handed:
        """Move all parts, or none; raises the first error with everything given back.

        allocated_bytes: asked while both sides are there.
        """
        moves: list[AccountedMove] = []
        try:
            return self._exchange(leaving, coming, allocated_bytes, moves)
        except BaseException as error:
            for move in reversed(moves):
                self._take_back(move, error)
            raise

    def _exchange(
        self,
        leaving: Sequence[Movable],
        coming: Sequence[Movable],
        allocated_bytes: Callable[[], int | None],
        moves: list[AccountedMove],
    ) -> Handed:
        """The order is what makes it safe. `moves`: takes those that start."""
        began = time.perf_counter()
        written = {part.host_key for part in leaving if self._directory.needs_copy(part)}
        departures = [self._start(part, moves, to_device=False) for part in leaving]
        arrivals = [
            self._start(part, moves, to_device=True)
            for part in coming
            if part.host_key not in written
        ]
        for move in moves:
            move.wait()
        # A host copy that was being written is whole only now.
        arrivals += [
            self._start(part, moves, to_device=True) for part in coming if part.host_key in written
        ]
        came = [move.finish() for move in arrivals]
        both_bytes, allocated = self._ledger.device_bytes, allocated_bytes()
        left = [replace(move.finish(), device_bytes=both_bytes) for move in departures]
        after = {
            "device_bytes": self._ledger.device_bytes,
            "host_bytes": self._ledger.host_bytes,
        }
        seconds = time.perf_counter() - began
        return Handed(
            _divided(seconds, left),
            _divided(seconds, [replace(move, **after) for move in came]),
            allocated,
        )

    def _start(
        self, part: Movable, moves: list[AccountedMove], *, to_device: bool
    ) -> AccountedMove:
        move = AccountedMove(part, self._directory, self._ledger, to_device=to_device)
        moves.append(move)
        return move

    def _take_back(self, move: AccountedMove, error: BaseException) -> None:
        """Leave the part where it was; where that fails, the run is poisoned."""
        part = move.part
        if move.is_finished:
            self._transaction.undo([part], move.to_device, error)
        elif move.is_open:
            self._give_up(move, error)
        elif part.is_resident is move.to_device:  # it failed, and failed to restore itself
            self._transaction.lose(part, f"{part.name}: {error}")

    def _give_up(self, move: AccountedMove, error: BaseException) -> None:
        try:
            move.give_up()
        except BaseException as second:
            name = move.part.name
            self._transaction.lose(move.part, f"{name}: {error}; giving it up: {second}")
            error.add_note(f"giving up the move of {name} failed too: {second}")


def _divided(seconds: float, moves: Sequence[ComponentMove]) -> tuple[ComponentMove, ...]:
    """The moves with `seconds` divided by their bytes."""
    total = max(1, sum(move.moved.num_bytes for move in moves))
    return tuple(replace(m, seconds=seconds * m.moved.num_bytes / total) for m in moves)
