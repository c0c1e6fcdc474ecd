"""`residency: auto`: the cheapest moves that fit the device, searched before they are made.

In go the parts of a run, the workspace of its phases and a budget; out comes a rule that tells the
planner which idle parts stay. A run is cut into segments, each ending with an optimizer step:

    ROLLOUT REWARD TRAIN | ROLLOUT REWARD TRAIN | evaluation SAVE ROLLOUT REWARD TRAIN | ...

The plain window repeats, so it is solved once, as a cycle. Other segments are rare. They are solved
as paths between fixed ends, one search for each sequence of kinds that occurs. The *boundary rule*
fixes the ends: in every optimizer step the same parts are on the device, those that the plain cycle
keeps there. So each segment can be solved without knowing its neighbours, and an evaluation never
makes the windows around it dearer. The run starts as if a step had just been; what is not on the
device by then is brought in by its first use. After the last step nothing must come back.

Sizes are taken as given: moments that appear with the first step count from the beginning.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from unirl.residency.gaps import Gap, Part, cycle_gaps, path_gaps
from unirl.residency.policy import Role
from unirl.residency.problem import ResidencyProblem, size_text
from unirl.residency.search import Choice, choose
from unirl.residency.timeline import Phase, PhaseKind, segments

logger = logging.getLogger("unirl.residency")

# --- the choice for one segment -------------------------------------------------------------------


@dataclass(frozen=True)
class Assignment:
    """What is decided about one sequence of phases."""

    kinds: tuple[PhaseKind, ...]
    gaps: tuple[Gap, ...]
    choice: Choice
    on_device: tuple[frozenset[str], ...]
    """In each phase, the names of the parts that are there: who works, and who is kept."""
    free_bytes: tuple[int, ...]
    """In each phase, what is left of the budget."""


def assign_window(problem: ResidencyProblem, window: Sequence[PhaseKind]) -> Assignment:
    """The best choice for windows of these phases that repeat for ever.

    Raises ConfigError when a phase does not fit.
    """
    problem.require_fit()
    return _assign(problem, window, cycle_gaps(problem.parts, window))


def assign_path(
    problem: ResidencyProblem, plain: Assignment, kinds: Sequence[PhaseKind]
) -> Assignment:
    """The best choice for phases that happen once, with the ends that the plain window gives."""
    gaps = path_gaps(problem.parts, kinds, plain.kinds, plain.on_device[-1])
    return _assign(problem, kinds, gaps)


def moved_bytes_per_window(problem: ResidencyProblem, window: Sequence[PhaseKind]) -> int:
    """Bytes both ways in each plain window, after the first. With true or false for every role it
    is what these booleans cost. Raises ConfigError when a phase does not fit."""
    return assign_window(problem, window).choice.moved_bytes


def _assign(
    problem: ResidencyProblem, kinds: Sequence[PhaseKind], gaps: Iterable[Gap]
) -> Assignment:
    asked = {part.name: problem.forced(part) for part in problem.parts}
    gaps = [
        gap if asked[gap.part] is None else replace(gap, forced=asked[gap.part]) for gap in gaps
    ]
    room = [problem.room(kind) for kind in kinds]
    choice = choose(gaps, room)
    kept = [[gap for gap in choice.kept if index in gap.phases] for index in range(len(kinds))]
    return Assignment(
        kinds=tuple(kinds),
        gaps=tuple(gaps),
        choice=choice,
        on_device=tuple(
            frozenset(part.name for part in problem.parts if part.is_needed(kind))
            | {gap.part for gap in staying}
            for kind, staying in zip(kinds, kept, strict=True)
        ),
        free_bytes=tuple(
            free - sum(gap.num_bytes for gap in staying)
            for free, staying in zip(room, kept, strict=True)
        ),
    )


# --- the rule -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """One phase of the run as the rule sees it."""

    kind: PhaseKind
    on_device: frozenset[str]


class AutoRule:
    """Tells the planner which idle parts stay, phase by phase (a `KeepRule`).

    It follows the run along its timeline. When another role works than the timeline says, as in
    the save of an interrupted run, it has lost its way: from then on it keeps only what the
    residency keys keep, which always fits.
    """

    def __init__(
        self, problem: ResidencyProblem, window: Sequence[PhaseKind], phases: Iterable[Phase]
    ) -> None:
        """`window`: the plain one. Raises ConfigError when a phase of the run does not fit."""
        self.plain = assign_window(problem, window)
        self._problem = problem
        self._parts = {part.name: part for part in problem.parts}
        self._pinned = frozenset(part.name for part in problem.parts if problem.forced(part))
        self._solved = {self.plain.kinds: self.plain}
        self._steps = self._follow(phases)
        self._now: _Step | None = _Step(PhaseKind.TRAIN, self.plain.on_device[-1])
        self._next = next(self._steps, None)
        self._is_lost = False

    def enter(self, role: Role) -> None:
        """`role` works next: one phase further."""
        if self._is_lost:
            return
        if self._next is None or self._next.kind.role is not role:
            self._lose(role)
            return
        self._now, self._next = self._next, next(self._steps, None)

    def is_pinned(self, role: Role) -> bool:
        return self._problem.explicit[role] is True

    def keeps(self, role: Role, component: str) -> bool:
        """Whether the part stays, now that `role` does not need it, until somebody needs it."""
        return component in self._staying(self._parts[component])

    @property
    def text(self) -> str:
        """The budget and a digest of all that decides; ranks with equal texts decide alike."""
        digest = hashlib.sha256(self._all_that_decides().encode()).hexdigest()[:12]
        return f"auto within {size_text(self._problem.budget_bytes)} ({digest})"

    def _all_that_decides(self) -> str:
        problem = self._problem
        parts = sorted(
            (
                p.name,
                p.num_bytes,
                p.bring_in_bytes,
                p.copies_out,
                p.once_per_step,
                _names(p.roles),
                _names(p.written_in),
            )
            for p in problem.parts
        )
        workspace = sorted((kind.value, size) for kind, size in problem.workspace.items())
        explicit = [problem.explicit[role] for role in Role]
        window = [kind.value for kind in self.plain.kinds]
        return repr((parts, workspace, problem.budget_bytes, explicit, window))

    def _staying(self, part: Part) -> frozenset[str]:
        """Who is on the device in the gap that is asked about: the present one of an idle part, or
        the one that comes next for a part whose phase is over."""
        if self._now is None:
            return self._pinned
        step = self._next if part.is_needed(self._now.kind) else self._now
        return self._pinned if step is None else step.on_device

    def _lose(self, role: Role) -> None:
        expected = "nothing more" if self._next is None else self._next.kind.value
        logger.info(
            "residency=auto: the run left its timeline, as when it is stopped (%s was next, %s "
            "came). From here on idle weights are parked unless a residency key keeps them.",
            expected,
            role.value,
        )
        self._is_lost = True
        self._now = self._next = None

    def _follow(self, phases: Iterable[Phase]) -> Iterator[_Step]:
        for segment in segments(phases):
            assignment = self._solve(tuple(phase.kind for phase in segment))
            for kind, on_device in zip(assignment.kinds, assignment.on_device, strict=True):
                yield _Step(kind, on_device)

    def _solve(self, kinds: tuple[PhaseKind, ...]) -> Assignment:
        if kinds not in self._solved:
            self._solved[kinds] = assign_path(self._problem, self.plain, kinds)
        return self._solved[kinds]


# --- why ------------------------------------------------------------------------------------------


def explain(problem: ResidencyProblem, plain: Assignment, part: str) -> list[str]:
    """For each gap of the part in the plain window, in one sentence, why it is kept or parked.

    Gaps with one reason share a sentence.
    """
    reasons: defaultdict[tuple[str, str], list[Gap]] = defaultdict(list)
    for gap in plain.gaps:
        if gap.part == part:
            reasons[_verdict(plain, gap), _why(problem, plain, gap)].append(gap)
    return [
        f"{verdict}{_times(gaps)}: {why}{_cost(plain, gaps)}"
        for (verdict, why), gaps in reasons.items()
    ]


def _verdict(plain: Assignment, gap: Gap) -> str:
    kinds = dict.fromkeys(plain.kinds[index].value for index in gap.phases)
    return f"{'kept' if gap in plain.choice.kept else 'parked'} through {', '.join(kinds)}"


def _times(gaps: Sequence[Gap]) -> str:
    return "" if len(gaps) == 1 else f" ({len(gaps)} times)"


def _cost(plain: Assignment, gaps: Sequence[Gap]) -> str:
    if gaps[0] in plain.choice.kept:
        return ""
    return f"; costs {size_text(sum(gap.cost_bytes for gap in gaps))} per window"


def _why(problem: ResidencyProblem, plain: Assignment, gap: Gap) -> str:
    if gap.forced is not None:
        part = next(part for part in problem.parts if part.name == gap.part)
        roles = [r for r in Role if r in part.roles and problem.explicit[r] is gap.forced]
        return " and ".join(f"{role.value}_resident={str(gap.forced).lower()}" for role in roles)
    tightest = min(gap.phases, key=lambda index: plain.free_bytes[index])
    free = plain.free_bytes[tightest]
    where = f" in {plain.kinds[tightest].value}" if len(gap.phases) > 1 else ""
    if gap in plain.choice.kept:
        beside = problem.budget_bytes - free - gap.num_bytes
        return f"{size_text(gap.num_bytes)} fit beside {size_text(beside)}{where}"
    return f"needs {size_text(gap.num_bytes)}, {size_text(free)} free{where}"


def _names(members: Iterable[Role | PhaseKind]) -> list[str]:
    return sorted(member.value for member in members)
