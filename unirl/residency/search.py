"""The exact search: which gaps to keep, so that as few bytes as possible move.

In go gaps and the room of each phase, out comes the best choice there is. Keeping a gap takes its
bytes of room in each phase it spans; parking it costs its bytes of traffic. That is a knapsack with
one sack per phase. There are few gaps, so branch and bound finds the best choice and proves it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from unirl.residency.gaps import Gap


@dataclass(frozen=True)
class Choice:
    """The best choice: fewest moved bytes, then fewest parked gaps, then most room left."""

    kept: frozenset[Gap]
    moved_bytes: int
    """The cost of all gaps that are parked."""
    num_parked: int
    """Gaps that are parked."""
    least_room: int
    """Bytes left in the phase where least are left."""
    num_nodes: int
    """Partial choices that were looked at, to tell how hard the search was."""


def choose(gaps: Sequence[Gap], room: Sequence[int]) -> Choice:
    """The best set of gaps to keep, such that those kept in phase p sum to at most room[p] bytes.

    Equal inputs in any order give the same choice: of equally good ones the first is taken, in the
    order of cost, then part name, then phases. Raises ValueError when the forced gaps do not fit.
    """
    forced = [gap for gap in gaps if gap.forced]
    free = [gap for gap in gaps if gap.forced is None]
    left = tuple(room)
    for gap in forced:
        left = _take(left, gap.phases, gap.num_bytes)
    if min(left) < 0:
        raise ValueError(f"the gaps that must be kept exceed the room of a phase by {-min(left)}")
    search = _Search(_decisions(free, left), left)
    search.visit(0, 0, left, ())
    kept = frozenset(forced).union(*(decision.gaps for decision in search.best))
    parked = [gap for gap in gaps if gap not in kept]
    return Choice(
        kept=kept,
        moved_bytes=sum(gap.cost_bytes for gap in parked),
        num_parked=len(parked),
        least_room=-search.best_value[1],
        num_nodes=search.num_nodes,
    )


@dataclass(frozen=True)
class _Decision:
    """One bit to decide: for one gap, or for equal gaps in phases that are alike."""

    gaps: tuple[Gap, ...]
    weight: int
    """What parking costs, bytes and gaps in one number: see `_decisions`."""

    @property
    def phases(self) -> tuple[int, ...]:
        """Where keeping takes room; of phases that are alike, the first stands for all."""
        return self.gaps[0].phases

    @property
    def num_bytes(self) -> int:
        return self.gaps[0].num_bytes

    @property
    def order(self) -> tuple[int, str, tuple[int, ...]]:
        return (-self.weight, self.gaps[0].part, self.phases)


def _decisions(gaps: Sequence[Gap], room: Sequence[int]) -> list[_Decision]:
    """The bits to decide, the heaviest first.

    One byte weighs more than all gaps together, so that the lightest choice is the one with the
    fewest bytes, and among those the one with the fewest parked gaps.
    """
    byte = len(gaps) + 1
    decisions = [
        _Decision(alike, sum(gap.cost_bytes * byte + 1 for gap in alike))
        for alike in _alike(gaps, room)
    ]
    return sorted(decisions, key=lambda decision: decision.order)


def _alike(gaps: Sequence[Gap], room: Sequence[int]) -> Iterable[tuple[Gap, ...]]:
    """Gaps that may be decided together, so that many rollouts in a window cost no more to search.

    Two phases are alike when they have equal room, when the same longer gaps span them, and when
    equal gaps begin and end in them. Whatever is decided about the longer gaps, the same is best in
    both.
    """
    local: defaultdict[int, list[Gap]] = defaultdict(list)
    for gap in sorted(gaps, key=lambda gap: (gap.part, gap.num_bytes, gap.cost_bytes)):
        if len(gap.phases) == 1:
            local[gap.phases[0]].append(gap)
    longer = [gap for gap in gaps if len(gap.phases) > 1]
    phases: defaultdict[object, list[int]] = defaultdict(list)
    for phase in sorted(local):
        spanning = tuple(index for index, gap in enumerate(longer) if phase in gap.phases)
        equal = tuple((gap.part, gap.num_bytes, gap.cost_bytes) for gap in local[phase])
        phases[room[phase], spanning, equal].append(phase)
    for group in phases.values():
        yield from zip(*(local[phase] for phase in group), strict=True)
    yield from ((gap,) for gap in longer)


class _Search:
    """Depth first through keep or park for one decision after the other."""

    def __init__(self, decisions: Sequence[_Decision], room: Sequence[int]) -> None:
        self._decisions = decisions
        self._sacks = _sacks(decisions, room)
        # To park everything is always possible.
        self.best: tuple[_Decision, ...] = ()
        self.best_value = (sum(decision.weight for decision in decisions), -min(room))
        self.num_nodes = 0

    def visit(
        self, index: int, parked: int, left: tuple[int, ...], kept: tuple[_Decision, ...]
    ) -> None:
        """Decide from `index` on, with `parked` weight so far and `left` bytes in each phase."""
        self.num_nodes += 1
        # No choice below this node is better: weight only grows and room only shrinks.
        bound = (parked + self._unavoidable(index, left), -min(left))
        if bound >= self.best_value:
            return
        if index == len(self._decisions):
            self.best, self.best_value = kept, bound
            return
        decision = self._decisions[index]
        if _fits(decision, left):
            rest = _take(left, decision.phases, decision.num_bytes)
            self.visit(index + 1, parked, rest, (*kept, decision))
        self.visit(index + 1, parked + decision.weight, left, kept)

    def _unavoidable(self, index: int, left: Sequence[int]) -> int:
        """Weight that must still be parked, at least, by the decisions from `index` on.

        Each decision counts in one sack only, and sacks may be filled with fractions (Dantzig's
        bound), so this never exceeds the truth.
        """
        total = 0
        for phase, members in self._sacks.items():
            free = left[phase]
            for position in members:
                decision = self._decisions[position]
                if position < index:
                    continue
                if not _fits(decision, left):
                    total += decision.weight
                elif decision.num_bytes <= free:
                    free -= decision.num_bytes
                else:
                    total += decision.weight - decision.weight * free // decision.num_bytes
                    free = 0
        return total


def _sacks(decisions: Sequence[_Decision], room: Sequence[int]) -> dict[int, list[int]]:
    """Phase -> positions of the decisions counted there, those that save most per byte first.

    A decision counts in the phase that is overfull by most when all is kept.
    """
    excess = [-free for free in room]
    for decision in decisions:
        for phase in decision.phases:
            excess[phase] += decision.num_bytes
    sacks: defaultdict[int, list[int]] = defaultdict(list)
    by_worth = sorted(
        range(len(decisions)),
        key=lambda position: Fraction(decisions[position].num_bytes, decisions[position].weight),
    )
    for position in by_worth:
        phases = decisions[position].phases
        sacks[max(phases, key=lambda phase: (excess[phase], -phase))].append(position)
    return dict(sacks)


def _fits(decision: _Decision, left: Sequence[int]) -> bool:
    return all(decision.num_bytes <= left[phase] for phase in decision.phases)


def _take(left: tuple[int, ...], phases: Iterable[int], num_bytes: int) -> tuple[int, ...]:
    taken = set(phases)
    return tuple(free - num_bytes if phase in taken else free for phase, free in enumerate(left))
