"""The stretches of time in which weights lie idle: the only places where there is a choice.

Between two uses of a part lies one *gap*. The part either stays on the device for the whole gap or
is parked in it, and what parking costs does not depend on where in the gap the part is away: so one
bit per gap decides all bytes. In go parts and a sequence of phases, out come the gaps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise, takewhile

from unirl.residency.policy import Role
from unirl.residency.timeline import PhaseKind


@dataclass(frozen=True)
class Part:
    """A component with what it takes and what it costs, all in bytes."""

    name: str
    roles: frozenset[Role]
    """Who needs it; more than one for weights that are shared."""
    num_bytes: int
    """What it takes on the device."""
    bring_in_bytes: int
    """Copied or built when it comes back; 0 for scratch, which comes back empty."""
    written_in: frozenset[PhaseKind]
    """Phases that write it."""
    copies_out: bool
    """Whether the host's copy must be written anew when it is parked after a write."""
    once_per_step: bool = False
    """Only the first of the phases in `written_in` after an optimizer step writes it: a push of
    what the engine holds already does nothing."""

    def is_needed(self, kind: PhaseKind) -> bool:
        return kind.role in self.roles


@dataclass(frozen=True)
class Gap:
    """One stretch in which a part is idle."""

    part: str
    phases: tuple[int, ...]
    """Indices of the phases it spans, in the order of time."""
    num_bytes: int
    """Taken in each of them when the part is kept."""
    cost_bytes: int
    """Moved when the part is parked: out, if it was written, and in again."""
    forced: bool | None = None
    """Kept (true) or parked (false) whatever it costs; None leaves it to the search."""


def cycle_gaps(parts: Iterable[Part], kinds: Sequence[PhaseKind]) -> list[Gap]:
    """The gaps of phases that repeat for ever; one gap may run over the end into the beginning."""
    gaps: list[Gap] = []
    for part in parts:
        uses = _uses(part, kinds)
        again = [use + len(kinds) for use in uses[:1]]
        for use, next_use in pairwise(uses + again):
            idle = tuple(phase % len(kinds) for phase in range(use + 1, next_use))
            cost = _copy_out_bytes(part, [*kinds, *kinds[: use + 1]]) + part.bring_in_bytes
            if idle:
                gaps.append(Gap(part.name, idle, part.num_bytes, cost))
    return gaps


def path_gaps(
    parts: Iterable[Part],
    kinds: Sequence[PhaseKind],
    window: Sequence[PhaseKind],
    boundary: Collection[str],
) -> list[Gap]:
    """The gaps of phases that happen once, between two optimizer steps or after the last.

    `window` is what went before and `boundary` who is on the device in its step. A path that ends
    with a step must end so too, and pays for bringing back what it leaves parked; after any other
    end nothing is needed any more.
    """
    returns = kinds[-1] is PhaseKind.TRAIN
    gaps: list[Gap] = []
    for part in parts:
        for use, next_use in pairwise([-1, *_uses(part, kinds), len(kinds)]):
            is_last = next_use == len(kinds)
            forced, cost = None, _copy_out_bytes(part, [*window, *kinds[: use + 1]])
            if returns or not is_last:
                cost += part.bring_in_bytes
            if returns and is_last:
                forced = part.name in boundary
            if use == -1 and part.name not in boundary:
                forced, cost = False, 0  # parked and paid for before
            idle = tuple(range(use + 1, next_use))
            if idle:
                gaps.append(Gap(part.name, idle, part.num_bytes, cost, forced))
    return gaps


def _uses(part: Part, kinds: Sequence[PhaseKind]) -> list[int]:
    return [index for index, kind in enumerate(kinds) if part.is_needed(kind)]


def _copy_out_bytes(part: Part, history: Sequence[PhaseKind]) -> int:
    """What parking copies to the host after these phases: the part, if its last use wrote it.

    Phases in a row that need it are one use. An older write was copied when the part was parked
    then; where it was kept instead, this is too little, but only for shared parts that are written.
    """
    writes = _writes(part, history)
    backwards = dropwhile(lambda index: not part.is_needed(history[index]), _reversed(history))
    last_use = takewhile(lambda index: part.is_needed(history[index]), backwards)
    was_written = any(index in writes for index in last_use)
    return part.num_bytes if part.copies_out and was_written else 0


def _writes(part: Part, history: Sequence[PhaseKind]) -> set[int]:
    """Indices of the phases that write the part."""
    writes: set[int] = set()
    is_current = False
    for index, kind in enumerate(history):
        if kind is PhaseKind.TRAIN:
            is_current = False
        if kind in part.written_in and not (part.once_per_step and is_current):
            writes.add(index)
            is_current = True
    return writes


def _reversed(history: Sequence[PhaseKind]) -> Iterable[int]:
    return reversed(range(len(history)))
