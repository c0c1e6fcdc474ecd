"""Properties of the search and of the rule, against brute force and a run played by the rule."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from unirl.core.errors import ConfigError
from unirl.residency.auto import (
    AutoRule,
    assign_path,
    assign_window,
    moved_bytes_per_window,
)
from unirl.residency.gaps import Gap, Part, cycle_gaps
from unirl.residency.policy import Role
from unirl.residency.problem import ResidencyProblem
from unirl.residency.search import choose
from unirl.residency.timeline import Phase, PhaseKind

G, R, T = PhaseKind.ROLLOUT, PhaseKind.REWARD, PhaseKind.TRAIN
EVALUATION = (PhaseKind.EVALUATE_ROLLOUT, PhaseKind.EVALUATE_REWARD)
PROPERTY = settings(max_examples=150, derandomize=True, deadline=None)
SMALL = st.integers(0, 12)
CHOICES = st.sampled_from([None, None, None, True, False])


@st.composite
def gap_lists(draw: st.DrawFn) -> tuple[list[Gap], list[int]]:
    """Up to 10 gaps over up to 5 phases, and room for those that must be kept."""
    num_phases = draw(st.integers(1, 5))
    gaps: dict[tuple[str, tuple[int, ...]], Gap] = {}
    for _ in range(draw(st.integers(0, 10))):
        first, length = draw(st.integers(0, num_phases - 1)), draw(st.integers(1, num_phases))
        phases = tuple((first + step) % num_phases for step in range(length))
        part = draw(st.sampled_from("abcdef"))
        gaps[part, phases] = Gap(part, phases, draw(SMALL), draw(SMALL), draw(CHOICES))
    room = draw(st.lists(st.integers(0, 30), min_size=num_phases, max_size=num_phases))
    for gap in gaps.values():
        for phase in gap.phases if gap.forced else ():
            room[phase] += gap.num_bytes
    return list(gaps.values()), room


@st.composite
def parts_of_roles(draw: st.DrawFn, largest: int = 6) -> tuple[Part, ...]:
    count = draw(st.integers(1, largest))
    parts = []
    for number in range(count):
        size = draw(SMALL)
        roles = draw(st.sets(st.sampled_from(list(Role)), min_size=1, max_size=2))
        writers = draw(st.sets(st.sampled_from([G, R, T]), max_size=1))
        brought_in = draw(st.sampled_from([0, size]))
        copies_out = draw(st.booleans())
        parts.append(
            Part(f"p{number}", frozenset(roles), size, brought_in, frozenset(writers), copies_out)
        )
    return tuple(parts)


@st.composite
def problems(draw: st.DrawFn) -> ResidencyProblem:
    """Problems in which every phase fits as the keys want it."""
    problem = ResidencyProblem(
        parts=draw(parts_of_roles()),
        workspace={kind: draw(SMALL) for kind in PhaseKind},
        budget_bytes=0,
        explicit={role: draw(CHOICES) for role in Role},
    )
    return replace(problem, budget_bytes=least_budget(problem) + draw(st.integers(0, 40)))


def least_budget(problem: ResidencyProblem) -> int:
    return max(sum(problem._held(kind).values()) for kind in PhaseKind)


def windows() -> st.SearchStrategy[tuple[PhaseKind, ...]]:
    return st.integers(1, 3).map(lambda count: (G, R) * count + (T,))


def value(gaps: Sequence[Gap], kept: Iterable[Gap], room: Sequence[int]) -> tuple[int, int, int]:
    """(moved bytes, gaps parked, least room with its sign turned), as the search minimises them."""
    kept = set(kept)
    left = list(room)
    for gap in kept:
        for phase in gap.phases:
            left[phase] -= gap.num_bytes
    parked = [gap for gap in gaps if gap not in kept]
    return sum(gap.cost_bytes for gap in parked), len(parked), -min(left)


def brute_force(gaps: Sequence[Gap], room: Sequence[int]) -> tuple[int, int, int]:
    """The best value over all sets of gaps."""
    options = [(True, False) if gap.forced is None else (gap.forced,) for gap in gaps]
    chosen = (
        [gap for gap, keep in zip(gaps, bits, strict=True) if keep] for bits in product(*options)
    )
    values = (value(gaps, kept, room) for kept in chosen)
    return min(v for v in values if v[2] <= 0)


@PROPERTY
@given(gap_lists())
def test_the_search_finds_what_trying_everything_finds(instance):
    gaps, room = instance
    choice = choose(gaps, room)
    assert value(gaps, choice.kept, room) == brute_force(gaps, room)
    assert (choice.moved_bytes, choice.num_parked, -choice.least_room) == brute_force(gaps, room)


@PROPERTY
@given(parts_of_roles(largest=4), windows(), st.lists(st.integers(0, 25), min_size=3, max_size=3))
def test_phases_that_are_alike_may_be_decided_together(parts, window, rooms):
    gaps = cycle_gaps(parts, window)
    assume(len(gaps) <= 11)
    room = [dict(zip((G, R, T), rooms, strict=True))[kind] for kind in window]
    assert value(gaps, choose(gaps, room).kept, room) == brute_force(gaps, room)


@PROPERTY
@given(gap_lists(), st.randoms(use_true_random=False))
def test_the_order_of_the_gaps_changes_nothing(instance, rng):
    gaps, room = instance
    expected = choose(gaps, room)
    rng.shuffle(gaps)
    assert choose(gaps, room) == expected


@PROPERTY
@given(gap_lists(), st.lists(st.integers(0, 9), min_size=5, max_size=5))
def test_more_room_never_costs_more(instance, more):
    gaps, room = instance
    roomier = [free + extra for free, extra in zip(room, more, strict=False)]
    before, after = choose(gaps, room), choose(gaps, roomier)
    assert (after.moved_bytes, after.num_parked) <= (before.moved_bytes, before.num_parked)


@PROPERTY
@given(problems(), windows(), st.integers(0, 20))
def test_a_larger_budget_never_moves_more(problem, window, more):
    larger = replace(problem, budget_bytes=problem.budget_bytes + more)
    assert moved_bytes_per_window(larger, window) <= moved_bytes_per_window(problem, window)


@PROPERTY
@given(problems(), windows())
def test_auto_is_never_worse_than_the_best_booleans(problem, window):
    auto = moved_bytes_per_window(replace(problem, explicit=dict.fromkeys(Role)), window)
    for bits in product([True, False], repeat=3):
        policy = replace(problem, explicit=dict(zip(Role, bits, strict=True)))
        try:
            moved = moved_bytes_per_window(policy, window)
        except ConfigError:
            continue
        assert auto <= moved


@PROPERTY
@given(problems(), windows())
def test_a_plain_window_costs_the_same_as_a_path(problem, window):
    plain = assign_window(problem, window)
    assert assign_path(problem, plain, window).choice.moved_bytes == plain.choice.moved_bytes


# --- a run ----------------------------------------------------------------------------------------


class PlayedRun:
    """Moves parts as the planner does: off what is idle and not kept, on what is needed."""

    def __init__(self, problem: ResidencyProblem, rule: AutoRule) -> None:
        self._problem = problem
        self._rule = rule
        self._dirty: set[str] = set()
        self.on_device = {p.name for p in problem.parts if p.roles & {Role.TRAIN, Role.REWARD}}
        self.moved_bytes = 0

    def enter(self, kind: PhaseKind) -> None:
        self._rule.enter(kind.role)
        for part in self._problem.parts:
            if not part.is_needed(kind) and part.name in self.on_device:
                self._leave_unless_kept(part)
        for part in self._problem.parts:
            if part.is_needed(kind) and part.name not in self.on_device:
                self.on_device.add(part.name)
                self.moved_bytes += part.bring_in_bytes
        self._dirty |= {p.name for p in self._problem.parts if kind in p.written_in}

    def end_of_rollout(self) -> None:
        """The planner is told to put the engine to sleep before it is told what comes next."""
        for part in self._problem.parts:
            if Role.ROLLOUT in part.roles and part.name in self.on_device:
                self._leave_unless_kept(part)

    def _leave_unless_kept(self, part: Part) -> None:
        if all(self._rule.keeps(role, part.name) for role in part.roles):
            return
        self.on_device.remove(part.name)
        if part.copies_out and part.name in self._dirty:
            self.moved_bytes += part.num_bytes
        self._dirty.discard(part.name)

    def bytes_held(self, kind: PhaseKind) -> int:
        held = sum(p.num_bytes for p in self._problem.parts if p.name in self.on_device)
        return held + self._problem.workspace[kind]


def each_use_writes_or_none(problem: ResidencyProblem) -> ResidencyProblem:
    """Shared parts are frozen and others written by their own phases: costs are exact then."""
    parts = tuple(
        replace(p, written_in=frozenset(k for k in p.written_in if {k.role} == p.roles))
        for p in problem.parts
    )
    return replace(problem, parts=parts)


@PROPERTY
@given(problems(), windows(), st.lists(st.sampled_from(["plain", "eval", "save"]), max_size=6))
def test_a_run_never_passes_the_budget_and_moves_what_was_planned(problem, window, segments):
    problem = each_use_writes_or_none(problem)
    heads = {"plain": (), "eval": EVALUATION * 2, "save": (PhaseKind.SAVE,)}
    names = [*segments, "plain", "plain"]
    run = [(name, (*heads[name], *window)) for name in names] + [("end", EVALUATION)]
    rule = AutoRule(problem, window, (Phase(kind, 0) for _, kinds in run for kind in kinds))
    played = PlayedRun(problem, rule)
    previous = "start"
    for name, kinds in run:
        before = played.moved_bytes
        for kind in kinds:
            played.enter(kind)
            assert played.bytes_held(kind) <= problem.budget_bytes
            if kind.role is Role.ROLLOUT:
                played.end_of_rollout()
        if (previous, name) == ("plain", "plain"):
            assert played.moved_bytes - before == rule.plain.choice.moved_bytes
        previous = name


# --- effort ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_twenty_gaps_are_searched_in_few_nodes(seed):
    """Sizes as different as those of real components, in sizes of many digits: no lucky ties."""
    rng = random.Random(seed)
    parts = tuple(
        Part(f"p{number}", frozenset({role}), size, size, frozenset(), copies_out=True)
        for role, count in ((Role.TRAIN, 4), (Role.ROLLOUT, 4), (Role.REWARD, 4))
        for number in range(count)
        for size in [int(10 ** rng.uniform(7, 10.5))]
    )
    parts = tuple(replace(p, name=f"{i}") for i, p in enumerate(parts))
    window = (G, R, G, R, T)
    gaps = cycle_gaps(parts, window)
    assert len(gaps) == 20
    total = sum(part.num_bytes for part in parts)
    nodes = [
        choose(gaps, [int(total * share)] * len(window)).num_nodes
        for share in (0.05, 0.1, 0.2, 0.3, 0.5)
    ]
    assert max(nodes) < 2000
