"""Where the copies of every component are, and which version each of them holds.

A component has a copy on the device, one on the host, both, or none. The optimizer step, a push or
a forward raise the version of what they write. From the versions follows what a move must do:
contents that are newer than the host's copy are copied out, everything else is just freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum

from unirl.core.components import VOID, Movable, Parking, Version, Void
from unirl.core.errors import ResidencyError


class State(Enum):
    """Where a component's contents are."""

    RESIDENT = "resident"
    """On the device."""
    PARKED = "parked"
    """On the host only."""
    DROPPED = "dropped"
    """Nowhere: built again, or written again, when it comes back."""
    MOVING_OUT = "moving out"
    MOVING_IN = "moving in"
    POISONED = "poisoned"
    """A move failed and could not be undone: nobody knows."""


_EDGES = {
    State.RESIDENT: {State.MOVING_OUT},
    State.PARKED: {State.MOVING_IN},
    State.DROPPED: {State.MOVING_IN},
    State.MOVING_OUT: {State.PARKED, State.DROPPED, State.RESIDENT},
    State.MOVING_IN: {State.RESIDENT, State.PARKED, State.DROPPED},
    State.POISONED: set(),
}


class Directory:
    """States and versions of a run's components."""

    def __init__(self, parts: Iterable[Movable]) -> None:
        """`parts` may be on the device or off it; what is off it was parked as it is now."""
        self._states: dict[str, State] = {}
        self._host_versions: dict[str, Version] = {}
        self._history: deque[str] = deque(maxlen=3)
        for part in parts:
            self._states[part.name] = State.RESIDENT if part.is_resident else _away(part)
            if self._states[part.name] is State.PARKED:
                self._remember_host_copy(part)

    def state(self, part: Movable) -> State:
        return self._states[part.name]

    def host_version(self, part: Movable) -> Version | Void:
        """Of the host copy the part is parked in, which other parts may share."""
        return self._host_versions.get(part.host_key, VOID)

    def needs_copy(self, part: Movable) -> bool:
        """Whether parking must copy: the device holds something that the host does not."""
        if part.parking is not Parking.COPY:
            return False
        version = part.version()
        if version is VOID:
            return False  # nothing to keep, and the host's copy may be good
        return version == Version(None) or self.host_version(part) != version

    def begin(self, part: Movable, *, to_device: bool) -> State:
        """A move starts; returns the state to go back to if it fails."""
        before = self._states[part.name]
        self._change(part.name, State.MOVING_IN if to_device else State.MOVING_OUT)
        return before

    def finish(self, part: Movable, *, to_device: bool) -> State:
        """The move is done; returns the new state."""
        after = State.RESIDENT if to_device else _away(part)
        self._change(part.name, after)
        if after is State.PARKED:
            self._remember_host_copy(part)
        return after

    def give_up(self, part: Movable, before: State) -> None:
        """The move failed and the part is as it was."""
        self._change(part.name, before)

    def poison(self, part: Movable) -> None:
        """Nobody knows any more where the part's contents are."""
        self._states[part.name] = State.POISONED

    def missing(self, parts: Iterable[Movable], besides: str = "") -> list[str]:
        """Why these parts cannot be used now, one phrase each.

        `besides`: parts written by this may be void, because it is about to write them.
        """
        phrases = []
        for part in parts:
            state = self._states[part.name]
            if part.on_demand:
                continue
            if state is not State.RESIDENT:
                phrases.append(f"{part.name} is {state.value} (host copy {self._host_text(part)})")
            elif part.version() is VOID and part.written_by not in (besides, "nobody"):
                phrases.append(
                    f"{part.name} is {VOID} on the device (host copy {self._host_text(part)}); "
                    f"only {part.written_by} fills it"
                )
        return phrases

    def _host_text(self, part: Movable) -> str:
        held = self.host_version(part)
        return str(held) if held is VOID else f"version {held}"

    def _remember_host_copy(self, part: Movable) -> None:
        version = part.version()
        if isinstance(version, Version):
            self._host_versions[part.host_key] = version

    def _change(self, name: str, after: State) -> None:
        before = self._states[name]
        if after not in _EDGES[before]:
            last = "; ".join(self._history) or "none"
            raise ResidencyError(
                f"{name} is {before.value} and cannot become {after.value}; last changes: {last}"
            )
        self._states[name] = after
        self._history.append(f"{name} {before.value} -> {after.value}")


def _away(part: Movable) -> State:
    return State.PARKED if part.parking is Parking.COPY else State.DROPPED
