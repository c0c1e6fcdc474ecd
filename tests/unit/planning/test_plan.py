"""Plans of whole recipes: what they add up to, what does not fit, and what would."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from make_golden_plans import golden_file, golden_plan, shipped_recipes

from unirl.cli.compose import compose_and_check
from unirl.config.schema import RunConfig
from unirl.core.errors import ConfigError
from unirl.planning.hardware import GIB, Target, make_target, reserve
from unirl.planning.plan import Plan, automatic, horizon, make_plan
from unirl.planning.remedy import RememberedWorkspace
from unirl.planning.report import as_json, difference, text
from unirl.planning.scorers import scorer_components
from unirl.residency.auto import moved_bytes_per_window
from unirl.residency.plan import transition_text, transitions
from unirl.residency.timeline import PhaseKind, plain_window, timeline

GATE = "diffusion/tiny/tiny_residency_gate"
FREE = ("train_resident=null", "rollout_resident=null", "reward_resident=null")
ESTIMATE = RememberedWorkspace()


def config_of(*overrides: str, recipe: str = GATE) -> RunConfig:
    config, problems = compose_and_check(recipe, ["~eval_rewards", *overrides])
    assert not problems
    return config


def plan_of(*overrides: str, recipe: str = GATE, budget_mib: float | None = None) -> Plan:
    config = config_of(*overrides, recipe=recipe)
    target = make_target(config, budget_gib=None if budget_mib is None else budget_mib / 1024)
    count = config.num_rollouts if config.num_rollouts < 20 else horizon(config)
    return make_plan(config, target, scorer_components(config), count, ESTIMATE)


def named(plan: Plan) -> list[str]:
    return [transition_text(group) for group in transitions(plan.window)]


# --- all shipped recipes --------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_the_plan_of_a_shipped_recipe_is_the_one_on_file(recipe: str) -> None:
    expected = json.loads(golden_file(recipe).read_text())
    planned = json.loads(json.dumps(golden_plan(recipe)))
    assert planned == expected, "run scripts/make_golden_plans.py and look at the difference"
    assert planned["fits"]


# --- moves and bytes ------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", list(product((False, True), repeat=3)))
@pytest.mark.parametrize("more", [(), ("rollout.share_base=true",), ("accumulate_rollouts=2",)])
def test_a_windows_bytes_are_what_the_gaps_between_uses_cost(
    resident: tuple[bool, bool, bool], more: tuple[str, ...]
) -> None:
    """Two ways to the same number: the simulated loop, and arithmetic on idle gaps."""
    keys = [
        f"{role}_resident={str(stays).lower()}"
        for role, stays in zip(("train", "rollout", "reward"), resident, strict=True)
    ]
    plan = plan_of("num_rollouts=8", *keys, *more)
    window = plain_window(plan.config)
    assert plan.window_traffic.moved_bytes == moved_bytes_per_window(plan.problem, window)


def test_the_gate_moves_in_the_published_order() -> None:
    plan = plan_of()
    assert named(plan) == [
        "train offload",
        "rollout onload",
        "rollout offload",
        "reward onload",
        "reward offload",
        "train onload",
    ]
    assert plan.notes.host_bytes["network.base"] > 1_000_000, "one copy for both roles"
    assert "rollout.base" not in plan.notes.host_bytes


def test_frozen_weights_are_never_copied_to_the_host() -> None:
    plan = plan_of("num_rollouts=6")
    base = [line for line in plan.notes.lines if str(line["component"]).endswith(".base")]
    assert {line["role"] for line in base} == {"train", "rollout"}
    assert sum(line["moved_bytes"] for line in base if line["move"] == "offload") == 0


def test_a_shared_base_is_on_the_device_once_and_moves_once_a_window() -> None:
    own, shared = plan_of("num_rollouts=6"), plan_of("num_rollouts=6", "rollout.share_base=true")
    base_bytes = own.notes.parts["train.base"].num_bytes()
    assert "rollout.base" not in shared.notes.parts
    saved = own.window_traffic.onload_bytes - shared.window_traffic.onload_bytes
    assert saved == base_bytes, "it stays from the step to the next rollout"
    for ours, theirs in zip(own.peaks, shared.peaks, strict=True):
        assert ours.total_bytes == theirs.total_bytes, "parked roles never held it twice"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("accumulate_rollouts=2", "num_rollouts=6"),
        ("eval_interval=2", "save_interval=2", "num_rollouts=4", "eval_num_prompts=20"),
        ("eval_interval=1", "save_interval=3", "num_rollouts=4", "save_reads=host"),
        ("save_interval=3", "num_rollouts=4", "train_resident=true"),
        ("weight_sync_interval=3", "num_rollouts=7", "eval_interval=5"),
    ],
)
def test_the_timeline_is_what_the_loop_really_does(overrides: tuple[str, ...]) -> None:
    plan = plan_of(*overrides)
    prompts = 256 if plan.config.eval_num_prompts > 256 else plan.config.eval_num_prompts
    expected = [phase.kind for phase in timeline(plan.config, 0, [prompts])]
    done = [note.kind for note in plan.notes.phases]
    if plan.config.save_reads == "host":  # such a save is no phase: nobody has to be there
        done = [kind for kind in done if kind is not PhaseKind.SAVE]
    assert done == expected


# --- residency=auto -------------------------------------------------------------------------------


@pytest.mark.parametrize("budget_mib", [78, 81, 86, 92, 100, 1000])
@pytest.mark.parametrize(
    "more",
    [(), ("accumulate_rollouts=4", "stack.micro_batch_size=16", "rollout.share_base=true")],
)
def test_auto_moves_what_it_promised_and_never_more_than_any_policy_that_fits(
    budget_mib: int, more: tuple[str, ...]
) -> None:
    auto = plan_of("residency=auto", "num_rollouts=12", *FREE, *more, budget_mib=budget_mib)
    assert auto.fits
    moved = auto.window_traffic.moved_bytes
    assert moved == automatic(auto).choice.moved_bytes
    for resident in product(("true", "false"), repeat=3):
        roles = ("train", "rollout", "reward")
        keys = [f"{role}_resident={stays}" for role, stays in zip(roles, resident, strict=True)]
        policy = plan_of("num_rollouts=12", *keys, *more, budget_mib=budget_mib)
        if policy.fits:
            assert moved <= policy.window_traffic.moved_bytes


def test_auto_keeps_to_the_keys_that_are_set() -> None:
    free = plan_of("residency=auto", "num_rollouts=6", *FREE, budget_mib=1000)
    assert named(free) == []
    bound = plan_of(
        *("residency=auto", "num_rollouts=6", *FREE[:2], "reward_resident=false"), budget_mib=1000
    )
    assert named(bound) == ["reward onload", "reward offload"]
    assert "reward.ocr.network: parked through" in text(bound, GATE)
    assert "reward_resident=false" in text(bound, GATE)


def test_auto_that_cannot_fit_is_a_plan_with_everything_parked() -> None:
    """A run is refused instead (tests/integration/test_memory_budgets.py)."""
    auto = plan_of("residency=auto", *FREE, budget_mib=40)
    parked = plan_of(budget_mib=40)
    assert not auto.fits
    assert as_json(auto, GATE)["moves"] == as_json(parked, GATE)["moves"]
    assert "Does not fit: train needs" in text(auto, GATE)


def test_moments_on_demand_leave_their_memory_to_the_backward() -> None:
    full = ("stack.lora=null", "train_resident=true", "num_rollouts=6")
    there, lent = plan_of(*full), plan_of(*full, "optimizer_resident=false")
    moments = there.notes.parts["train.moments"].num_bytes()
    assert moments > 10_000_000
    with_moments = {peak.kind: peak.total_bytes for peak in there.peaks}
    without = {peak.kind: peak.total_bytes for peak in lent.peaks}
    assert without[PhaseKind.TRAIN] == with_moments[PhaseKind.TRAIN] - moments
    assert "train.moments" in next(
        peak.note.device_bytes for peak in lent.peaks if peak.kind is PhaseKind.STEP
    )
    extra = lent.window_traffic.moved_bytes - there.window_traffic.moved_bytes
    assert extra == 2 * moments, "in and out for the one step of a window"
    assert "train onload (optimizer step)" in named(lent)


# --- what does not fit ----------------------------------------------------------------------------


def test_a_plan_that_does_not_fit_names_phase_sum_and_the_largest() -> None:
    plan = plan_of(budget_mib=40)
    peak = plan.too_big
    assert peak is not None
    assert peak.kind is PhaseKind.TRAIN
    last = text(plan, GATE).splitlines()[-1]
    assert last.startswith("Does not fit: train needs ")
    assert "the budget is 40.0 MiB. The largest: workspace " in last
    assert "train.base" in last


def test_host_memory_is_checked_too() -> None:
    plan = plan_of()
    small = replace(plan, target=replace(plan.target, host_bytes=plan.host_bytes - 1))
    assert plan.fits
    assert not small.fits
    assert "of host memory" in text(small, GATE)


# --- texts ----------------------------------------------------------------------------------------


def test_json_and_text_say_the_same() -> None:
    plan = plan_of(budget_mib=100)
    told = as_json(plan, GATE)
    assert json.loads(json.dumps(told)) == told
    assert [phase["phase"] for phase in told["phases"]] == ["rollout", "reward", "train"]
    for phase in told["phases"]:
        held = sum(phase["device_bytes"].values())
        assert phase["total_bytes"] == held + phase["workspace_bytes"]
        assert f"{phase['total_bytes'] / 2**20:.2f}" in text(plan, GATE)
    assert told["window"]["transitions"] == named(plan)


def test_what_if_lists_only_what_changes() -> None:
    parked, resident = plan_of(), plan_of("train_resident=true")
    lines = difference(parked, resident)
    assert any("moved per window" in line for line in lines)
    assert not any(line.startswith("  train  ") for line in lines)
    assert difference(parked, parked)[0] == "  nothing changes"


def test_prompts_and_scorers_that_are_not_here_are_said_to_be_missing() -> None:
    config = config_of().model_copy(
        update={"data": config_of().data.model_copy(update={"train": "/nowhere/prompts.txt"})}
    )
    broken: dict[str, Any] = {"scorers": {"mine": {"path": "no_such_package.rewards:Mine"}}}
    config = RunConfig.model_validate({**config.model_dump(), "reward": broken})
    plan = make_plan(config, make_target(config), scorer_components(config), 2, ESTIMATE)
    told = text(plan, GATE)
    assert "Not counted: prompts of /nowhere/prompts.txt" in told
    assert "Not counted: scorer mine, which cannot be built here" in told


# --- targets --------------------------------------------------------------------------------------


def test_a_gpu_keeps_a_reserve_and_a_budget_does_not() -> None:
    config = config_of()
    gpu = make_target(config, "rtx4090")
    assert gpu.budget_bytes is not None
    assert gpu.memory_bytes == 24564 * 2**20
    assert gpu.budget_bytes == gpu.memory_bytes - reserve(gpu.memory_bytes)
    assert make_target(config, "rtx4090", budget_gib=20).budget_bytes == 20 * GIB
    assert make_target(config).budget_bytes is None


def test_the_recipes_own_budgets_are_taken_unless_others_are_given() -> None:
    config = config_of("device_budget_gib=3", "host_budget_gib=5")
    assert make_target(config).budget_bytes == 3 * GIB
    assert make_target(config).host_bytes == 5 * GIB
    assert make_target(config, "h200", host_gib=7).host_bytes == 7 * GIB
    assert make_target(config, "h200").budget_bytes == 3 * GIB, "the smaller of the two"
    assert make_target(config, "h200", budget_gib=9).budget_bytes == 9 * GIB


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="h100-80g, h200"):
        make_target(config_of(), "h900")


@pytest.mark.parametrize(
    ("memory", "kept"), [(4, 0.8), (8, 1.6), (15, 2), (24, 2.4), (80, 8), (140, 14)]
)
def test_the_reserve_is_a_tenth_at_least_two_gib_at_most_a_fifth(memory: int, kept: float) -> None:
    assert reserve(memory * GIB) == pytest.approx(kept * GIB, abs=2)


def test_seconds_follow_from_the_rates() -> None:
    plan = plan_of()
    target: Target = make_target(plan.config, "h200", rate=2)
    moved = plan.window_traffic
    expected = moved.moved_bytes / 2e9
    assert moved.seconds(target.onload_rate, target.offload_rate) == pytest.approx(expected)
