"""Which steps are stochastic, swept over every small schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, groupby, pairwise, product
from typing import Any

import pytest

from unirl.config.schema import SdeStepsConfig
from unirl.config.step_selection import earliest_last_step
from unirl.core.errors import ConfigError
from unirl.samplers.window import select_sde_steps

FRACTIONS = (0.0, 0.25, 0.5, 0.6, 0.99, 1.0)
ROLLOUTS = (0, 1, 7, 50)
SAME_FOR_ALL = ("all", "random", "window", "progressive", "list")


def selection(strategy: str, **values: Any) -> SdeStepsConfig:
    return SdeStepsConfig.model_validate({"strategy": strategy, **values})


def select(
    config: SdeStepsConfig,
    total: int,
    rollout_id: int,
    seed: int = 0,
    group_size: int = 2,
    samples_per_start: int = 1,
) -> tuple[tuple[int, ...], ...]:
    return select_sde_steps(config, total, rollout_id, seed, group_size, samples_per_start)


def steps_of(config: SdeStepsConfig, total: int, rollout_id: int, seed: int = 0) -> tuple[int, ...]:
    """Those of a strategy that gives all samples the same."""
    first, *others = select(config, total, rollout_id, seed, group_size=4)
    assert all(other == first for other in others)
    return first


def candidate_ranges() -> Iterator[tuple[int, list[float], range]]:
    """Every possible small (T, range) and the steps it holds."""
    for total, start, end in product(range(2, 13), FRACTIONS, FRACTIONS):
        candidates = range(int(total * start), min(int(total * end), total - 1))
        if start < end and candidates:
            yield total, [start, end], candidates


def selections(strategy: str) -> Iterator[tuple[SdeStepsConfig, int, range, int]]:
    """Every possible small setting: (config, T, candidate steps, number of steps)."""
    for total, bounds, candidates in candidate_ranges():
        if strategy == "list":
            for steps in combinations(range(min(total - 1, 4)), 2):
                yield selection("list", steps=[*steps[::-1]]), total, range(total - 1), 2
        elif strategy in ("all", "stratified"):
            size = len(candidates) if strategy == "all" else 1
            yield selection(strategy, range=bounds), total, candidates, size
        else:
            for size in range(1, len(candidates) + 1):
                values = {"range": bounds, "num_steps": size, "rollouts_per_window": 2}
                yield selection(strategy, **values), total, candidates, size


@pytest.mark.parametrize("strategy", [*SAME_FOR_ALL, "stratified"])
def test_steps_are_never_empty_in_range_ascending_equal_in_number_and_without_the_last_step(
    strategy: str,
) -> None:
    for config, total, candidates, expected in selections(strategy):
        for rollout_id in ROLLOUTS:
            samples = select(config, total, rollout_id, seed=3, group_size=6)
            assert len(samples) == 6
            if strategy in SAME_FOR_ALL:
                assert len(set(samples)) == 1
            for steps in set(samples):
                assert len(steps) == expected > 0
                assert set(steps) <= set(candidates)
                assert total - 1 not in steps
                assert list(steps) == sorted(set(steps))
                if strategy in ("window", "progressive"):
                    assert steps == tuple(range(steps[0], steps[0] + expected))


@pytest.mark.parametrize("strategy", ["random", "window", "progressive", "stratified"])
def test_steps_depend_on_seed_and_rollout_id_alone(strategy: str) -> None:
    config = selection(strategy, num_steps=None if strategy == "stratified" else 2)
    drawn = [select(config, 10, rollout_id) for rollout_id in range(40)]
    again = [select(config, 10, rollout_id) for rollout_id in reversed(range(40))]
    assert again[::-1] == drawn
    if strategy != "progressive":
        assert drawn != [select(config, 10, rollout_id, seed=1) for rollout_id in range(40)]


def test_draws_are_those_of_runs_made_before() -> None:
    """A run that is resumed after an update of the program goes on with its own steps."""
    random, window = (selection(strategy, num_steps=3) for strategy in ("random", "window"))
    assert [steps_of(random, 10, rollout_id, seed=5) for rollout_id in range(3)] == [
        (0, 4, 6),
        (4, 5, 7),
        (0, 2, 6),
    ]
    starts = [steps_of(window, 10, rollout_id, seed=5)[0] for rollout_id in range(8)]
    assert starts == [6, 4, 3, 5, 4, 6, 1, 2]


@pytest.mark.parametrize("strategy", ["random", "window"])
def test_every_step_of_the_range_is_drawn_sometimes(strategy: str) -> None:
    config = selection(strategy, num_steps=3)
    drawn = {step for rollout_id in range(200) for step in steps_of(config, 8, rollout_id)}
    assert drawn == set(range(7))


def test_listed_steps_are_taken_whatever_the_range_says() -> None:
    config = selection("list", steps=[4, 1], range=[0.9, 1.0])
    assert steps_of(config, 10, 3) == (1, 4)


# Stratified


def test_stratified_steps_are_spread_evenly_over_the_starts() -> None:
    for total, bounds, candidates in candidate_ranges():
        config = selection("stratified", range=bounds)
        for num_starts, rollout_id in product(range(1, 15), (0, 5)):
            samples = select(config, total, rollout_id, group_size=num_starts)
            uses = Counter(step for (step,) in samples)
            few, rest = divmod(num_starts, len(candidates))
            counts = [uses[step] for step in candidates]
            assert sorted(counts) == [few] * (len(candidates) - rest) + [few + 1] * rest


@pytest.mark.parametrize(("group_size", "samples_per_start"), [(12, 3), (12, 12), (12, 1)])
def test_samples_of_one_start_share_their_step(group_size: int, samples_per_start: int) -> None:
    config = selection("stratified")
    samples = select(config, 20, 1, 0, group_size, samples_per_start)
    starts = [samples[i : i + samples_per_start] for i in range(0, group_size, samples_per_start)]
    assert all(len(set(start)) == 1 for start in starts)
    assert len(set(samples)) == len(starts)


@pytest.mark.parametrize("num_starts", [4, 5, 7])
def test_every_start_gets_every_step_in_the_course_of_rollouts(num_starts: int) -> None:
    config = selection("stratified")
    rollouts = [select(config, 6, rollout_id, group_size=num_starts) for rollout_id in range(100)]
    for start in range(num_starts):
        assert {samples[start] for samples in rollouts} == {(step,) for step in range(5)}


# Progressive


def starts_of(config: SdeStepsConfig, total: int, num_rollouts: int) -> list[int]:
    return [steps_of(config, total, rollout_id)[0] for rollout_id in range(num_rollouts)]


def stays(config: SdeStepsConfig, total: int, num_rollouts: int) -> list[tuple[int, int]]:
    """(first step of the window, rollouts it stays there), one after the other."""
    starts = starts_of(config, total, num_rollouts)
    return [(start, len([*run])) for start, run in groupby(starts)]


def test_a_progressive_window_moves_by_one_step_and_stays_on_the_last() -> None:
    config = selection("progressive", num_steps=3, rollouts_per_window=5)
    assert starts_of(config, 8, 40) == [min(rollout_id // 5, 4) for rollout_id in range(40)]


def test_a_progressive_window_moves_by_its_stride_and_leaves_no_step_out() -> None:
    """A last move shorter than the stride takes it to the end of the range."""
    for total, bounds, candidates in candidate_ranges():
        for size, stride in product(range(1, len(candidates) + 1), range(1, 5)):
            values = {"range": bounds, "num_steps": size, "window_stride": stride}
            config = selection("progressive", rollouts_per_window=1, **values)
            starts = starts_of(config, total, len(candidates) + 1)
            moves = [b - a for a, b in pairwise(starts) if b > a]
            assert starts[0] == candidates.start
            assert starts[-1] + size == candidates.stop
            assert moves[:-1] == [stride] * (len(moves) - 1)
            assert all(1 <= move <= stride for move in moves)


@pytest.mark.parametrize("pace", ["constant", "decay", "exp_decay"])
@pytest.mark.parametrize(
    ("stride", "positions"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3, 4]), (9, [0, 4])]
)
def test_rolling_back_visits_every_position_again_in_the_same_order(
    pace: str, stride: int, positions: list[int]
) -> None:
    values = {"num_steps": 2, "window_stride": stride, "rollouts_per_window": 3}
    once = selection("progressive", window_pace=pace, **values)
    again = selection("progressive", window_pace=pace, roll_back=True, **values)
    *course, (last, _) = stays(once, 7, 100)
    cycle = [*course, (last, 3 if pace == "constant" else 1)]
    length = sum(count for _, count in cycle)
    assert [start for start, _ in cycle] == positions
    assert stays(again, 7, 3 * length) == 3 * cycle


@pytest.mark.parametrize(
    ("pace", "counts"),
    [("constant", [8, 8, 8, 8]), ("decay", [8, 6, 3, 1]), ("exp_decay", [8, 4, 2, 1])],
)
def test_a_decaying_pace_falls_linearly_or_geometrically(pace: str, counts: list[int]) -> None:
    config = selection(
        "progressive", num_steps=1, rollouts_per_window=8, window_pace=pace, roll_back=True
    )
    assert stays(config, 5, sum(counts)) == list(enumerate(counts))


def test_a_decaying_pace_only_falls_and_ends_at_its_smallest_stay() -> None:
    for pace, first, last in product(("decay", "exp_decay"), range(1, 9), range(1, 9)):
        if last > first:
            continue
        values = {"rollouts_per_window": first, "min_rollouts_per_window": last}
        config = selection("progressive", num_steps=2, window_pace=pace, roll_back=True, **values)
        counts = [count for _, count in stays(config, 9, 8 * first)][:7]
        assert counts == sorted(counts, reverse=True)
        assert (counts[0], counts[-1]) == (first, last)


def test_a_window_as_wide_as_its_range_stays_where_it_is() -> None:
    for roll_back in (False, True):
        config = selection("progressive", num_steps=7, rollouts_per_window=2, roll_back=roll_back)
        assert set(starts_of(config, 8, 20)) == {0}


# What cannot be selected


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (selection("all", range=[0.9, 1.0]), "range of 10 steps"),
        (selection("stratified", range=[0.9, 1.0]), "range of 10 steps"),
        (selection("random", num_steps=6, range=[0.0, 0.5]), "num_steps is 6"),
        (selection("window", num_steps=10), "num_steps is 10"),
        (selection("progressive", range=[0.5, 0.5], num_steps=1), "range is"),
        (selection("window"), "num_steps is null"),
        (selection("list"), "steps is null"),
        (selection("list", steps=[0, 9]), r"steps is \[0, 9\]"),
        (selection("list", steps=[2, 2]), r"steps is \[2, 2\]"),
    ],
)
def test_what_cannot_be_selected_is_refused_with_its_key(config: SdeStepsConfig, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^sampling\.sde_steps\.{key}"):
        select(config, 10, 0)


@pytest.mark.parametrize(("group_size", "samples_per_start"), [(8, 3), (2, 4), (0, 1)])
def test_a_group_that_is_no_whole_number_of_starts_is_refused(
    group_size: int, samples_per_start: int
) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.samples_per_start="):
        select(selection("stratified"), 10, 0, 0, group_size, samples_per_start)


@pytest.mark.parametrize("strategy", [*SAME_FOR_ALL, "stratified"])
@pytest.mark.parametrize("num_starts", [2, 5])
def test_some_rollout_ends_at_the_earliest_last_step_and_none_before(
    strategy: str, num_starts: int
) -> None:
    values: dict[str, Any] = {"steps": [4, 1]} if strategy == "list" else {"range": [0.2, 0.9]}
    if strategy not in ("all", "stratified", "list"):
        values["num_steps"] = 2
    config = selection(strategy, **values)
    samples = (select(config, 8, rollout, group_size=num_starts) for rollout in range(300))
    ends = [max(step for steps in sample for step in steps) for sample in samples]
    assert min(ends) == earliest_last_step(config, 8, num_starts)
