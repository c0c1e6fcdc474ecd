"""The phases of a run, against lists written by hand."""

from __future__ import annotations

from itertools import groupby, islice
from typing import Any

import pytest

from unirl.config.schema import RunConfig
from unirl.residency.policy import Role
from unirl.residency.timeline import (
    Phase,
    PhaseKind,
    phase_kinds,
    plain_window,
    segments,
    timeline,
)

LETTERS = {
    "G": PhaseKind.ROLLOUT,
    "R": PhaseKind.REWARD,
    "T": PhaseKind.TRAIN,
    "g": PhaseKind.EVALUATE_ROLLOUT,
    "r": PhaseKind.EVALUATE_REWARD,
    "S": PhaseKind.SAVE,
}
LETTER_OF = {kind: letter for letter, kind in LETTERS.items()}

GATE_ARMS: dict[str, dict[str, Any]] = {
    "1": {},
    "2": {"train_resident": True, "reward_resident": True},
    "3": {"eval_interval": 2, "save_interval": 2},
    "4": {"eval_interval": 1, "eval_num_prompts": 24, "eval_chunk_prompts": 8, "save_interval": 2},
    "5": {
        "accumulate_rollouts": 2,
        "eval_interval": 4,
        "save_interval": 4,
        "eval_num_prompts": 16,
        "eval_chunk_prompts": 8,
        "num_rollouts": 10,
    },
}


def config(**keys: Any) -> RunConfig:
    return RunConfig.model_validate({"num_rollouts": 2} | keys)


def phases(start: int = 0, num_eval_prompts: int | None = None, **keys: Any) -> list[Phase]:
    asked = config(**keys)
    return list(timeline(asked, start, [num_eval_prompts or asked.eval_num_prompts or 64]))


def letters(start: int = 0, num_eval_prompts: int | None = None, **keys: Any) -> str:
    return "".join(LETTER_OF[phase.kind] for phase in phases(start, num_eval_prompts, **keys))


def test_each_rollout_is_sampled_and_scored_and_each_window_trained():
    assert letters(num_rollouts=3) == "GRTGRTGRT"


def test_a_window_of_several_rollouts_trains_once_and_the_last_may_be_short():
    assert letters(num_rollouts=5, accumulate_rollouts=2) == "GRGRT" + "GRGRT" + "GRT"


def test_an_evaluation_comes_first_and_goes_through_both_roles_chunk_by_chunk():
    keys = {"num_rollouts": 3, "eval_interval": 2, "eval_chunk_prompts": 4}
    assert letters(num_eval_prompts=9, **keys) == "grgrgr" + "GRT" + "GRT" + "grgrgr" + "GRT"
    assert letters(num_eval_prompts=8, **keys) == "grgr" + "GRT" + "GRT" + "grgr" + "GRT"


def test_saves_come_when_due_and_at_the_end_but_not_twice():
    assert letters(num_rollouts=3, save_interval=2) == "GRT" + "GRTS" + "GRTS"
    assert letters(num_rollouts=4, save_interval=2) == "GRT" + "GRTS" + "GRT" + "GRTS"


def test_a_save_that_reads_the_host_is_no_phase():
    assert letters(num_rollouts=2, save_interval=1, save_reads="host") == "GRTGRT"


def test_a_save_follows_the_evaluation_of_the_same_window():
    keys = {"num_rollouts": 1, "eval_interval": 1, "save_interval": 1}
    assert letters(num_eval_prompts=1, **keys) == "gr" + "GRT" + "gr" + "S"


def test_a_resumed_run_begins_with_an_evaluation_where_one_is_due_and_counts_on():
    keys = {"num_rollouts": 6, "accumulate_rollouts": 2, "eval_interval": 3}
    assert letters(start=3, num_eval_prompts=1, **keys) == "gr" + "GRGRT" + "GRT" + "gr"
    keys["eval_interval"] = 4
    assert letters(start=3, num_eval_prompts=1, **keys) == "GRGRT" + "GRT"


def test_a_run_that_has_reached_its_end_only_evaluates():
    assert letters(start=2, num_eval_prompts=1, eval_interval=1, save_interval=1) == "gr"


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ("1", "GRTGRT"),
        ("2", "GRTGRT"),
        ("3", "gr" * 4 + "GRTGRT" + "gr" * 4 + "S"),
        ("4", "gr" * 3 + "GRT" + "gr" * 3 + "GRT" + "gr" * 3 + "S"),
        ("5", "grgr" + "GRGRT" * 2 + "grgrS" + "GRGRT" * 2 + "grgrS" + "GRGRTS"),
    ],
)
def test_the_arms_of_the_gate(arm, expected):
    assert letters(**GATE_ARMS[arm]) == expected


@pytest.mark.parametrize(
    ("arm", "onloads"),
    [("1", (2, 2, 2)), ("3", (3, 10, 10)), ("4", (3, 11, 11)), ("5", (7, 16, 16))],
)
def test_with_all_roles_parked_the_arms_give_the_onloads_of_the_docs(arm, onloads):
    """Each change of the role that works is one onload."""
    runs = [role for role, _ in groupby(phase.kind.role for phase in phases(**GATE_ARMS[arm]))]
    assert tuple(runs.count(role) for role in (Role.TRAIN, Role.ROLLOUT, Role.REWARD)) == onloads


def test_phases_carry_the_number_that_their_moves_are_filed_under():
    keys = {"num_rollouts": 4, "accumulate_rollouts": 2, "eval_interval": 2, "save_interval": 2}
    seen = [(LETTER_OF[p.kind], p.rollout) for p in phases(start=2, num_eval_prompts=1, **keys)]
    assert seen == [
        *[("g", 2), ("r", 2)],
        *[("G", 2), ("R", 2), ("G", 3), ("R", 3), ("T", 3)],
        *[("g", 4), ("r", 4), ("S", 4)],
    ]


def test_a_long_run_is_not_written_out():
    endless = timeline(config(num_rollouts=10**12), 0, [1])
    cut = segments(endless)
    assert [len(segment) for segment in islice(cut, 2)] == [3, 3]
    assert next(endless) == Phase(PhaseKind.ROLLOUT, 2)


def test_segments_end_with_each_step_and_lose_nothing():
    run = phases(**GATE_ARMS["5"])
    cut = list(segments(run))
    assert [phase for segment in cut for phase in segment] == run
    texts = ["".join(LETTER_OF[phase.kind] for phase in segment) for segment in cut]
    assert texts == ["grgrGRGRT", "GRGRT", "grgrSGRGRT", "GRGRT", "grgrSGRGRT", "S"]


def test_the_plain_window_has_neither_evaluation_nor_save():
    kinds = plain_window(config(num_rollouts=9, accumulate_rollouts=2, eval_interval=1))
    assert "".join(LETTER_OF[kind] for kind in kinds) == "GRGRT"
    assert len(plain_window(config(num_rollouts=2, accumulate_rollouts=5))) == 5


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"eval_interval": 1},
        {"save_interval": 1},
        {"save_interval": 1, "save_reads": "host"},
        {"eval_interval": 2, "save_interval": 3, "accumulate_rollouts": 2},
    ],
)
def test_the_kinds_of_a_run_are_those_of_its_phases(keys):
    assert phase_kinds(config(**keys)) == {phase.kind for phase in phases(**keys)}
