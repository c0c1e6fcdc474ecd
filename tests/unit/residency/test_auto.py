"""What `residency: auto` decides, why, and how it follows a run."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import pytest

from unirl.core.errors import ConfigError
from unirl.residency.auto import (
    Assignment,
    AutoRule,
    assign_path,
    assign_window,
    explain,
    moved_bytes_per_window,
)
from unirl.residency.gaps import Gap, Part, cycle_gaps, path_gaps
from unirl.residency.policy import Role
from unirl.residency.problem import ResidencyProblem
from unirl.residency.search import choose
from unirl.residency.timeline import Phase, PhaseKind

TRAIN, ROLLOUT, REWARD = Role.TRAIN, Role.ROLLOUT, Role.REWARD
LETTERS = {
    "G": PhaseKind.ROLLOUT,
    "R": PhaseKind.REWARD,
    "T": PhaseKind.TRAIN,
    "g": PhaseKind.EVALUATE_ROLLOUT,
    "r": PhaseKind.EVALUATE_REWARD,
    "S": PhaseKind.SAVE,
}
FREE: Mapping[Role, bool | None] = {TRAIN: None, ROLLOUT: None, REWARD: None}
GB = 10**9


def kinds(letters: str) -> tuple[PhaseKind, ...]:
    return tuple(LETTERS[letter] for letter in letters)


def part(name: str, roles: Sequence[Role], num_bytes: int, written_in: str = "") -> Part:
    return Part(
        name, frozenset(roles), num_bytes, num_bytes, frozenset(kinds(written_in)), copies_out=True
    )


def large_model(budget_gb: int, *, shared_base: bool) -> ResidencyProblem:
    """LoRA on a transformer of 20 billion weights, on one GPU."""
    base = [part("train.base", [TRAIN], 40 * GB), part("rollout.base", [ROLLOUT], 40 * GB)]
    if shared_base:
        base = [part("shared.base", [TRAIN, ROLLOUT], 40 * GB)]
    return ResidencyProblem(
        parts=(
            *base,
            part("train.adapter", [TRAIN], 15 * GB // 10, written_in="T"),
            part("rollout.encoders", [ROLLOUT], 163 * GB // 10),
            part("reward.net", [REWARD], 16 * GB),
        ),
        workspace=dict(zip(kinds("GRT"), (8 * GB, 4 * GB, 25 * GB), strict=True)),
        budget_bytes=budget_gb * GB,
        explicit=FREE,
    )


def small(budget: int, **explicit: bool) -> ResidencyProblem:
    """train 10 (of which 2 are written), rollout 6, reward 5; no workspace."""
    return ResidencyProblem(
        parts=(
            part("train.base", [TRAIN], 8),
            part("train.adapter", [TRAIN], 2, written_in="T"),
            part("rollout.net", [ROLLOUT], 6),
            part("reward.net", [REWARD], 5),
        ),
        workspace=dict.fromkeys(PhaseKind, 0),
        budget_bytes=budget,
        explicit={role: explicit.get(role.value) for role in Role},
    )


def staying(assignment: Assignment, problem: ResidencyProblem) -> list[list[str]]:
    """In each phase, who is kept although idle."""
    return [
        sorted(p.name for p in problem.parts if p.name in there and not p.is_needed(kind))
        for kind, there in zip(assignment.kinds, assignment.on_device, strict=True)
    ]


# --- gaps -----------------------------------------------------------------------------------------


def test_in_a_cycle_the_last_gap_runs_into_the_beginning():
    parts = [part("net", [ROLLOUT], 7, written_in="G")]
    assert cycle_gaps(parts, kinds("GRGRT")) == [Gap("net", (1,), 7, 14), Gap("net", (3, 4), 7, 14)]


def test_a_part_that_is_always_needed_has_no_gap():
    parts = [part("net", [TRAIN, ROLLOUT, REWARD], 7)]
    assert cycle_gaps(parts, kinds("GRT")) == []
    assert path_gaps(parts, kinds("grS"), kinds("GRT"), {"net"}) == []


def test_parking_costs_the_copy_out_only_after_a_phase_that_writes():
    parts = [part("net", [TRAIN, ROLLOUT], 7, written_in="T")]
    costs = {gap.phases: gap.cost_bytes for gap in cycle_gaps(parts, kinds("GRGRT"))}
    assert costs == {(1,): 14, (3,): 7}, "T and the G after it are one use"
    [gap] = cycle_gaps([part("adapter", [TRAIN], 7, written_in="T")], kinds("GRT"))
    assert gap.cost_bytes == 14
    [gap] = cycle_gaps([replace(part("x", [TRAIN], 7, "T"), copies_out=False)], kinds("GRT"))
    assert gap.cost_bytes == 7


def test_a_path_ends_as_the_boundary_says():
    """Kept through the step: free to leave before, bound to be there at the end."""
    parts = [part("net", [ROLLOUT], 7, written_in="G")]
    plain, path = kinds("GRT"), kinds("SGRT")
    kept = path_gaps(parts, path, plain, {"net"})
    assert kept == [Gap("net", (0,), 7, 14), Gap("net", (2, 3), 7, 14, forced=True)]
    parked = path_gaps(parts, path, plain, ())
    assert parked == [
        Gap("net", (0,), 7, 0, forced=False),
        Gap("net", (2, 3), 7, 14, forced=False),
    ], "who is parked over the step pays for the way back beforehand"


def test_after_the_last_step_nothing_must_come_back():
    parts = [part("net", [ROLLOUT], 7, written_in="g")]
    assert path_gaps(parts, kinds("grS"), kinds("GRT"), ()) == [Gap("net", (1, 2), 7, 7)]


# --- the search -----------------------------------------------------------------------------------


def test_fewer_bytes_come_before_fewer_moves():
    large = Gap("large", (0,), 3, 4)
    small_ones = [Gap(name, (0,), 1, 1) for name in "abc"]
    choice = choose([large, *small_ones], [3])
    assert choice.kept == {large}
    assert (choice.moved_bytes, choice.num_parked) == (3, 3)


def test_the_first_choice_found_is_not_taken_for_the_best():
    """The dearest gap fills the room alone; two others are worth more together."""
    sizes_and_costs = {"a": (3, 7), "b": (7, 6), "c": (9, 9), "d": (5, 4)}
    choice = choose([Gap(name, (0,), *pair) for name, pair in sizes_and_costs.items()], [9])
    assert {gap.part for gap in choice.kept} == {"a", "d"}


def test_with_equal_bytes_fewer_gaps_are_parked():
    scratch = [Gap(name, (0,), size, 0) for name, size in (("a", 3), ("b", 3), ("large", 6))]
    choice = choose(scratch, [6])
    assert sorted(gap.part for gap in choice.kept) == ["a", "b"]
    assert (choice.moved_bytes, choice.num_parked) == (0, 1)


def test_with_equal_bytes_and_moves_most_room_is_left():
    wide, slim = Gap("a", (0,), 6, 5), Gap("b", (0,), 4, 5)
    choice = choose([wide, slim], [8])
    assert choice.kept == {slim}
    assert choice.least_room == 4


def test_ties_go_by_name():
    gaps = [Gap(name, (0,), 4, 4) for name in "cab"]
    assert {gap.part for gap in choose(gaps, [8]).kept} == {"a", "b"}


def test_forced_gaps_are_kept_and_parked_whatever_it_costs():
    cheap = Gap("cheap", (0,), 5, 1, forced=True)
    dear = Gap("dear", (0,), 5, 9)
    thrown_out = Gap("thrown out", (0,), 1, 7, forced=False)
    choice = choose([cheap, dear, thrown_out], [9])
    assert choice.kept == {cheap}
    assert choice.moved_bytes == 16
    with pytest.raises(ValueError, match="exceed the room of a phase by 1"):
        choose([cheap], [4])


def test_phases_that_are_alike_are_searched_once():
    problem = large_model(76, shared_base=False)
    few, many = (assign_window(problem, kinds("GR" * a + "T")).choice for a in (4, 64))
    assert many.num_nodes == few.num_nodes
    assert many.moved_bytes - few.moved_bytes == 60 * (16 * GB + 163 * GB // 10)


def test_phases_of_other_room_or_under_other_gaps_are_not_alike():
    pair = [Gap("a", (0,), 5, 5), Gap("a", (1,), 5, 5)]
    assert choose(pair, [5, 4]).kept == {pair[0]}
    assert choose(pair, [4, 5]).kept == {pair[1]}
    longer = Gap("b", (1, 2), 3, 20)
    assert choose([*pair, longer], [5, 5, 5]).kept == {pair[0], longer}


# --- a worked example -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget_gb", "num_rollouts", "own_base", "shared_base"),
    [
        (76, 1, 112.3, 32.3),
        (76, 4, 209.2, 129.2),
        (92, 1, 96.0, 16.0),
        (92, 4, 96.0, 16.0),
        (136, 1, 16.0, 0.0),
        (136, 4, 16.0, 0.0),
    ],
)
def test_gigabytes_per_window_of_a_large_model(budget_gb, num_rollouts, own_base, shared_base):
    window = kinds("GR" * num_rollouts + "T")
    own = moved_bytes_per_window(large_model(budget_gb, shared_base=False), window)
    shared = moved_bytes_per_window(large_model(budget_gb, shared_base=True), window)
    assert (own / GB, shared / GB) == (own_base, shared_base)


def test_booleans_cost_what_parking_whole_roles_costs():
    """All parked, 4 rollouts: the trainer once, engine and reward each time, and 1.5 GB out."""
    problem = replace(large_model(76, shared_base=False), explicit=dict.fromkeys(Role, False))
    moved = moved_bytes_per_window(problem, kinds("GRGRGRGRT"))
    assert moved == (41.5 + 1.5 + 4 * (56.3 + 16)) * GB


# --- explicit keys --------------------------------------------------------------------------------


def test_explicit_booleans_are_constraints():
    window = kinds("GRT")
    free = assign_window(small(21), window)
    assert free.choice.moved_bytes == 0
    forced = assign_window(small(21, rollout=False), window)
    assert forced.choice.moved_bytes == 6
    assert staying(forced, small(21)) == [
        ["reward.net", "train.adapter", "train.base"],
        ["train.adapter", "train.base"],
        ["reward.net"],
    ]
    tight = assign_window(small(15, reward=True), window)
    assert all("reward.net" in there for there in tight.on_device)


@pytest.mark.parametrize(
    ("train", "rollout", "is_kept"),
    [
        (True, False, True),
        (False, True, True),
        (True, None, True),
        (False, False, False),
        (False, None, True),
    ],
)
def test_a_shared_part_is_kept_for_one_role_and_parked_only_for_all(train, rollout, is_kept):
    problem = ResidencyProblem(
        (part("base", [TRAIN, ROLLOUT], 5),),
        dict.fromkeys(PhaseKind, 0),
        100,
        {TRAIN: train, ROLLOUT: rollout, REWARD: None},
    )
    there = assign_window(problem, kinds("GRT")).on_device
    assert ("base" in there[1]) == is_kept


# --- what does not fit ----------------------------------------------------------------------------


def test_a_phase_that_never_fits_is_refused_with_the_sum_and_the_three_largest():
    problem = large_model(66, shared_base=False)
    with pytest.raises(ConfigError) as caught:
        assign_window(problem, kinds("GRT"))
    assert str(caught.value) == (
        "train needs 61.9 GiB on the device, which has 61.5 GiB. The largest: train.base 37.3 GiB, "
        "workspace 23.3 GiB, train.adapter 1.4 GiB. Use a smaller stack.micro_batch_size, "
        "backend.activation_checkpointing=true or a larger device (device_budget_gib). "
        "`unirl plan` shows all phases."
    )


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (PhaseKind.ROLLOUT, "rollout.forward_batch_size"),
        (PhaseKind.REWARD, "reward.scorers"),
        (PhaseKind.EVALUATE_ROLLOUT, "eval_chunk_prompts"),
        (PhaseKind.EVALUATE_REWARD, "eval_chunk_prompts"),
        (PhaseKind.SAVE, "save_reads=host"),
    ],
)
def test_each_kind_of_phase_has_its_own_advice(kind, key):
    problem = replace(small(20), workspace=dict.fromkeys(PhaseKind, 0) | {kind: 100})
    with pytest.raises(ConfigError, match=rf"{kind.value} needs .* {key}"):
        problem.require_fit()


def test_kinds_that_the_run_does_not_have_are_not_checked():
    replace(small(10), workspace=dict.fromkeys(kinds("GRT"), 0)).require_fit()


def test_a_forced_keep_that_does_not_fit_names_the_fewest_keys_to_change():
    with pytest.raises(ConfigError, match=r"rollout needs .*: train.base .*Set train_resident=fal"):
        small(12, train=True).require_fit()
    with pytest.raises(ConfigError) as caught:
        small(20, train=True, rollout=True, reward=True).require_fit()
    assert "Set train_resident=false, or null" in str(caught.value), "21 bytes: one is enough"
    with pytest.raises(ConfigError) as caught:
        small(10, train=True, reward=True).require_fit()
    assert "Set train_resident=false and reward_resident=false, or null" in str(caught.value)
    small(21, train=True, rollout=True, reward=True).require_fit()


def test_a_part_that_two_keys_keep_needs_both_changed():
    problem = ResidencyProblem(
        (part("net", [ROLLOUT, REWARD], 5), part("train.base", [TRAIN], 5)),
        dict.fromkeys(PhaseKind, 0),
        9,
        {TRAIN: None, ROLLOUT: True, REWARD: True},
    )
    with pytest.raises(ConfigError, match="rollout_resident=false and reward_resident=false"):
        problem.require_fit()


# --- following a run ------------------------------------------------------------------------------


def rule_for(
    problem: ResidencyProblem, *letters_of_segments: str, window: str = "GRT"
) -> tuple[AutoRule, list[Role]]:
    run = [Phase(kind, 0) for kind in kinds("".join(letters_of_segments))]
    return AutoRule(problem, kinds(window), run), [phase.kind.role for phase in run]


def kept_by(rule: AutoRule, problem: ResidencyProblem, active: Role) -> Collection[str]:
    """Idle parts that the planner would leave on the device."""
    return {
        p.name
        for p in problem.parts
        if active not in p.roles and all(rule.keeps(role, p.name) for role in p.roles)
    }


def test_the_rule_keeps_what_the_plain_window_keeps():
    """Free: G 9, R 10, T 5. Adapter and reward save 9 bytes there, the trainer's base only 8."""
    problem = small(15)
    rule, roles = rule_for(problem, "GRT", "GRT")
    seen = []
    for role in roles:
        rule.enter(role)
        seen.append(kept_by(rule, problem, role))
    assert seen == [{"train.adapter", "reward.net"}, {"train.adapter"}, {"reward.net"}] * 2


def test_a_part_whose_phase_is_over_is_answered_for_the_gap_that_follows():
    """The planner asks about the engine when sampling has ended, before the reward is entered."""
    problem = large_model(76, shared_base=False)
    rule, _ = rule_for(problem, "GRGRT", "GRGRT", window="GRGRT")
    rule.enter(ROLLOUT)
    assert rule.keeps(ROLLOUT, "rollout.base"), "fits beside the reward"
    assert not rule.keeps(ROLLOUT, "rollout.encoders")
    rule.enter(REWARD)
    assert rule.keeps(ROLLOUT, "rollout.base"), "asked again in the gap itself"
    rule.enter(ROLLOUT)
    assert not rule.keeps(ROLLOUT, "rollout.base"), "this gap reaches over the step"


def test_a_part_that_is_needed_again_at_once_is_kept():
    problem = small(11)
    rule, _ = rule_for(problem, "GRT", "SGRT")
    for role in (ROLLOUT, REWARD, TRAIN):
        rule.enter(role)
    assert rule.keeps(TRAIN, "train.base"), "the save needs it"
    rule.enter(TRAIN)
    assert not rule.keeps(TRAIN, "train.base")


def test_before_the_first_phase_it_answers_as_in_an_optimizer_step():
    problem = small(15)
    rule, _ = rule_for(problem, "GRT")
    assert rule.keeps(REWARD, "reward.net")
    assert not rule.keeps(ROLLOUT, "rollout.net")
    assert not rule_for(small(14), "GRT")[0].keeps(REWARD, "reward.net")


def test_an_evaluation_is_planned_between_the_same_ends():
    """Large evaluation chunks push out what a window keeps, and only while they last."""
    problem = replace(small(21), workspace=dict.fromkeys(PhaseKind, 0) | {LETTERS["g"]: 8})
    rule, roles = rule_for(problem, "GRT", "grgrGRT", "GRT")
    kept = []
    for role in roles:
        rule.enter(role)
        kept.append("train.base" in kept_by(rule, problem, role) or role is TRAIN)
    assert kept == [True] * 3 + [False] * 4 + [False] * 2 + [True] + [True] * 3


def test_segments_of_one_kind_are_solved_once():
    problem = small(15)
    plain = assign_window(problem, kinds("GRT"))
    again = assign_path(problem, plain, kinds("GRT"))
    assert again.on_device == plain.on_device
    run = [Phase(kind, 0) for kind in kinds("GRT" + "SGRT" * 50)]
    rule = AutoRule(problem, kinds("GRT"), run)
    for phase in run:
        rule.enter(phase.kind.role)
    assert set(rule._solved) == {kinds("GRT"), kinds("SGRT")}
    assert rule._solved[kinds("GRT")] is rule.plain


def test_a_run_of_one_short_window_works():
    problem = small(15)
    rule, roles = rule_for(problem, "GRT", window="GRGRT")
    for role in roles:
        rule.enter(role)
    assert kept_by(rule, problem, TRAIN) == {"reward.net"}


def test_the_timeline_is_read_no_further_than_the_next_segment():
    read = []

    def endless():
        for number in range(10**9):
            read.append(number)
            yield Phase(kinds("GRT")[number % 3], number // 3)

    rule = AutoRule(small(15), kinds("GRT"), endless())
    rule.enter(ROLLOUT)
    assert len(read) == 3


def test_off_the_timeline_it_says_so_once_and_keeps_only_what_the_keys_keep(caplog):
    problem = small(21, reward=True)
    rule, _ = rule_for(problem, "GRT", "GRT")
    rule.enter(ROLLOUT)
    assert kept_by(rule, problem, ROLLOUT) == {"reward.net", "train.base", "train.adapter"}
    with caplog.at_level(logging.INFO, logger="unirl.residency"):
        rule.enter(TRAIN)
        rule.enter(ROLLOUT)
        rule.enter(REWARD)
    assert len(caplog.messages) == 1
    assert "(reward was next, train came)" in caplog.messages[0]
    assert kept_by(rule, problem, ROLLOUT) == {"reward.net"}


def test_after_the_end_only_the_keys_count():
    problem = small(21, reward=True)
    rule, roles = rule_for(problem, "GRT")
    for role in roles:
        rule.enter(role)
    assert not rule.keeps(TRAIN, "train.base")
    assert rule.keeps(REWARD, "reward.net")
    rule.enter(TRAIN)
    assert kept_by(rule, problem, TRAIN) == {"reward.net"}


def test_a_pinned_role_stays_after_its_last_phase():
    rule, roles = rule_for(small(21, train=True), "GRT")
    for role in roles:
        rule.enter(role)
    assert rule.keeps(TRAIN, "train.base")


def test_only_an_explicit_true_pins_a_role():
    rule, _ = rule_for(small(21, reward=True, train=False), "GRT")
    assert [rule.is_pinned(role) for role in (TRAIN, ROLLOUT, REWARD)] == [False, False, True]


def test_rules_have_equal_texts_when_they_decide_alike():
    problem = small(21)
    text = rule_for(problem, "GRT")[0].text
    shuffled = replace(
        problem,
        parts=problem.parts[::-1],
        workspace=dict(reversed(problem.workspace.items())),
    )
    assert rule_for(shuffled, "GRT", "GRT")[0].text == text
    larger = replace(problem, parts=(replace(problem.parts[0], num_bytes=9), *problem.parts[1:]))
    others = [
        larger,
        replace(problem, workspace={**problem.workspace, PhaseKind.SAVE: 1}),
        replace(problem, budget_bytes=22),
        small(21, train=True),
    ]
    assert all(rule_for(other, "GRT")[0].text != text for other in others)


def test_the_text_is_the_same_in_every_process():
    """Sets have another order in each."""
    shared = part("base", [TRAIN, ROLLOUT, REWARD], 3, written_in="GRTgrS")
    problem = ResidencyProblem((shared,), dict.fromkeys(PhaseKind, 0), 2**30, FREE)
    assert rule_for(problem, "GRT")[0].text == "auto within 1.0 GiB (dd18c9cb5aa3)"


# --- why ------------------------------------------------------------------------------------------


def test_each_gap_is_explained_in_a_sentence():
    gib = 2**30
    problem = ResidencyProblem(
        parts=(
            part("train.base", [TRAIN], 30 * gib, written_in="T"),
            part("rollout.base", [ROLLOUT], 40 * gib),
            part("reward.net", [REWARD], 16 * gib),
        ),
        workspace=dict(zip(kinds("GRT"), (8 * gib, 4 * gib, 25 * gib), strict=True)),
        budget_bytes=76 * gib,
        explicit={TRAIN: False, ROLLOUT: None, REWARD: None},
    )
    plain = assign_window(problem, kinds("GRGRGRT"))
    assert explain(problem, plain, "rollout.base") == [
        "kept through reward (2 times): 40.0 GiB fit beside 20.0 GiB",
        "parked through reward, train: needs 40.0 GiB, 5.0 GiB free in train; "
        "costs 40.0 GiB per window",
    ]
    assert explain(problem, plain, "reward.net") == [
        "kept through rollout (2 times): 16.0 GiB fit beside 48.0 GiB",
        "kept through train, rollout: 16.0 GiB fit beside 55.0 GiB in train",
    ]
    assert explain(problem, plain, "train.base") == [
        "parked through rollout, reward: train_resident=false; costs 60.0 GiB per window"
    ]
