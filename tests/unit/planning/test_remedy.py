"""What makes a recipe fit: it does, nothing of it is idle, and few estimates are made for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from unirl.cli.compose import compose_and_check
from unirl.config.schema import RunConfig
from unirl.core.errors import ConfigError
from unirl.planning import remedy
from unirl.planning.blueprint import Blueprint
from unirl.planning.hardware import Target, make_target
from unirl.planning.plan import Plan, make_plan
from unirl.planning.remedy import Change, RememberedWorkspace, smallest_change
from unirl.planning.scorers import scorer_components
from unirl.planning.workspace import Workspace, estimate_workspace

GATE = "diffusion/tiny/tiny_residency_gate"
"""All roles parked; 16 samples of 2 transitions a rollout."""
ESTIMATE = RememberedWorkspace()
MIB = 2**20
AUTO = "residency=auto"
NULL = ("train_resident=null", "rollout_resident=null", "reward_resident=null")
CHECKPOINTING = "backend.activation_checkpointing=true"


def config_of(*overrides: str) -> RunConfig:
    config, problems = compose_and_check(GATE, ["~eval_rewards", *overrides])
    assert not problems
    return config


def target_of(budget_mib: float | None, host_mib: float | None) -> Target:
    return make_target(
        config_of(),
        budget_gib=None if budget_mib is None else budget_mib / 1024,
        host_gib=None if host_mib is None else host_mib / 1024,
    )


def planned(
    config: RunConfig,
    target: Target,
    estimate: Callable[[RunConfig, Blueprint], Workspace] = ESTIMATE,
) -> Plan:
    return make_plan(config, target, scorer_components(config), config.num_rollouts, estimate)


def plan_of(
    *overrides: str, budget_mib: float | None = None, host_mib: float | None = None
) -> Plan:
    return planned(config_of(*overrides), target_of(budget_mib, host_mib))


def words_for(plan: Plan) -> list[str] | None:
    """Overrides that are named for a plan, key by key."""
    changes = smallest_change(plan, lambda config: planned(config, plan.target))
    return None if changes is None else [word for c in changes for word in str(c).split()]


def without_each(words: Sequence[str]) -> list[list[str]]:
    return [[other for other in words if other != word] for word in words]


# --- the device -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "budget_mib", "expected"),
    [
        (("reward_resident=true",), 78, ["reward_resident=false"]),
        (("rollout_resident=true",), 78, ["rollout_resident=false"]),
        ((), 60, [CHECKPOINTING]),
        (("rollout_resident=true",), 30, ["rollout.share_base=true", CHECKPOINTING]),
        (
            ("stack.lora=null", "train_resident=true", CHECKPOINTING),
            40,
            ["optimizer_resident=false"],
        ),
        ((), 16, [CHECKPOINTING, "stack.micro_batch_size=8"]),
        (
            (),
            12,
            [
                CHECKPOINTING,
                "optimizer_resident=false",
                "rollout.forward_batch_size=4",
                "stack.micro_batch_size=2",
            ],
        ),
        ((AUTO, *NULL[:2], "reward_resident=true"), 78, ["reward_resident=null"]),
        ((AUTO, *NULL), 60, [CHECKPOINTING]),
        (("rollout.engine=trainside", "train_resident=true", NULL[1]), 60, [CHECKPOINTING]),
    ],
)
def test_the_smallest_change_is_found_and_makes_it_fit(
    overrides: tuple[str, ...], budget_mib: float, expected: list[str]
) -> None:
    plan = plan_of(*overrides, budget_mib=budget_mib)
    assert not plan.fits
    words = words_for(plan)
    assert words is not None
    assert sorted(words) == sorted(expected)
    assert plan_of(*overrides, *words, budget_mib=budget_mib).fits
    for fewer in without_each(words):
        assert not plan_of(*overrides, *fewer, budget_mib=budget_mib).fits


@pytest.mark.parametrize("budget_mib", [12, 13, 20])
def test_no_larger_quarter_of_the_micro_batch_would_fit(budget_mib: float) -> None:
    fixed = (CHECKPOINTING, "rollout.forward_batch_size=1")
    plan = plan_of(*fixed, budget_mib=budget_mib)
    words = words_for(plan)
    assert words is not None
    *others, last = words
    named = int(last.removeprefix("stack.micro_batch_size="))
    larger = {1: 2, 2: 8, 8: 32}[named]
    more = (*fixed, *others, f"stack.micro_batch_size={larger}")
    assert not plan_of(*more, budget_mib=budget_mib).fits


def test_evaluations_count_where_they_sample_more_at_once() -> None:
    overrides = ("eval_interval=1", "eval_samples_per_prompt=8", CHECKPOINTING)
    plan = plan_of(*overrides, budget_mib=28)
    assert words_for(plan) == ["rollout.forward_batch_size=32"], "a quarter of 16 prompts x 8"


def test_a_decoder_that_is_too_big_gets_fewer_images_at_once() -> None:
    def with_large_decoder(config: RunConfig, blueprint: Blueprint) -> Workspace:
        space = ESTIMATE(config, blueprint)
        return replace(space, decode=2 * space.rollout)

    def replan(config: RunConfig) -> Plan:
        return planned(config, target_of(14, None), with_large_decoder)

    changes = smallest_change(replan(config_of(CHECKPOINTING, "stack.micro_batch_size=1")), replan)
    assert changes is not None
    assert [str(change) for change in changes] == ["rollout.forward_batch_size=4"]


def test_no_change_is_named_where_none_helps() -> None:
    assert words_for(plan_of(budget_mib=5)) is None


def test_a_recipe_that_cannot_be_planned_is_no_remedy() -> None:
    def refuse(config: RunConfig) -> Plan:
        raise ConfigError("sizes are not known")

    plan = plan_of(budget_mib=60)
    assert smallest_change(plan, refuse) is None


# --- the host -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "budget_mib", "host_mib", "expected"),
    [
        ((), None, 9, ["train_resident=true"]),
        ((), None, 2, ["train_resident=true", "rollout.share_base=true"]),
        (
            ("train_resident=true", "rollout.share_base=true", "optimizer_resident=false"),
            None,
            2,
            ["optimizer_resident=true"],
        ),
        ((CHECKPOINTING, "stack.micro_batch_size=8"), 18, 9, [AUTO, *NULL]),
        ((AUTO, *NULL[1:], "train_resident=false"), 1000, 9, ["train_resident=true"]),
        ((), 60, 9, ["train_resident=true", CHECKPOINTING]),
        (
            (CHECKPOINTING, "stack.micro_batch_size=8"),
            22,
            2,
            ["rollout.share_base=true", AUTO, *NULL],
        ),
    ],
)
def test_less_is_parked_where_the_host_is_too_small(
    overrides: tuple[str, ...], budget_mib: float | None, host_mib: float, expected: list[str]
) -> None:
    plan = plan_of(*overrides, budget_mib=budget_mib, host_mib=host_mib)
    assert plan.host_is_too_small
    words = words_for(plan)
    assert words is not None
    assert sorted(words) == sorted(expected)
    assert plan_of(*overrides, *words, budget_mib=budget_mib, host_mib=host_mib).fits


def test_smaller_batches_are_no_remedy_for_the_host() -> None:
    assert words_for(plan_of(budget_mib=16, host_mib=0.5)) is None


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget_mib", "host_mib", "num_estimates"),
    [(60, None, 1), (16, None, 2), (12, None, 2), (5, None, 1), (9.5, None, 1), (None, 0.5, 1)],
)
def test_the_workspace_is_estimated_once_and_again_only_for_batches_that_may_fit(
    budget_mib: float | None,
    host_mib: float | None,
    num_estimates: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    estimated: list[RunConfig] = []

    def counted(config: RunConfig, blueprint: Blueprint) -> Workspace:
        estimated.append(config)
        return estimate_workspace(config, blueprint)

    monkeypatch.setattr(remedy, "estimate_workspace", counted)
    estimate = RememberedWorkspace()
    target = target_of(budget_mib, host_mib)
    plan = planned(config_of(), target, estimate)
    assert not plan.fits
    smallest_change(plan, lambda config: planned(config, target, estimate))
    assert len(estimated) == num_estimates


def test_no_recipe_is_planned_twice() -> None:
    plan = plan_of("reward_resident=true", budget_mib=16)
    configs = [plan.config.model_dump_json()]

    def replan(config: RunConfig) -> Plan:
        configs.append(config.model_dump_json())
        return planned(config, plan.target)

    assert smallest_change(plan, replan) is not None
    assert len(configs) > 3
    assert len(set(configs)) == len(configs)


def test_a_change_reads_as_overrides_do() -> None:
    change = Change({"residency": "auto", "train_resident": None, "a.b": True, "c": 1}, frozenset())
    assert str(change) == "residency=auto train_resident=null a.b=true c=1"
