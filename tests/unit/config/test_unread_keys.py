"""What is set must count: a key that another one's value leaves unread is a problem."""

from __future__ import annotations

from typing import Any

import pytest
from builders import run_config

from unirl.config.checks import problems
from unirl.config.schema import SdeStepsConfig
from unirl.config.unread_keys import STRATEGIES_WITH_KEY

STEPS = "sampling.sde_steps"
TEN_STEPS = {"sampling.num_inference_steps": 10}
CLEAN = {"sampling.eta": 0, "sampling.init_same_noise": False}


def found(overrides: dict[str, Any], key: str) -> str:
    """The problem told of that key; empty when there is none."""
    return " ".join(p.message for p in problems(run_config(overrides)) if p.key == key)


def test_of_every_key_of_the_stochastic_steps_it_is_known_who_reads_it() -> None:
    assert STRATEGIES_WITH_KEY.keys() == SdeStepsConfig.model_fields.keys() - {"strategy"}


@pytest.mark.parametrize(
    ("key", "value", "other", "reader"),
    [
        (f"{STEPS}.range", [0.0, 0.5], {"strategy": "list", "steps": [1]}, "all"),
        (f"{STEPS}.steps", [1], {"strategy": "random", "num_steps": 1}, "list"),
        (f"{STEPS}.num_steps", 2, {"strategy": "all"}, "random"),
        (f"{STEPS}.num_steps", 1, {"strategy": "stratified"}, "random"),
        (f"{STEPS}.rollouts_per_window", 3, {"strategy": "window", "num_steps": 1}, "progressive"),
        (f"{STEPS}.window_stride", 2, {"strategy": "all"}, "progressive"),
        (f"{STEPS}.window_pace", "decay", {"strategy": "all"}, "progressive"),
        (f"{STEPS}.min_rollouts_per_window", 2, {"strategy": "all"}, "progressive"),
        (f"{STEPS}.roll_back", True, {"strategy": "stratified"}, "progressive"),
        ("stack.scheduler.total_steps", 9, {"type": "constant"}, "linear"),
        ("reward.num_retries", 3, {"on_failure": "raise"}, "retry"),
        ("reward.retry_seconds", 2.0, {"on_failure": "drop_group"}, "retry"),
        ("algorithm.ema_decay", 0.5, {"reference": "base"}, "ema"),
        ("train_fraction", 0.7, {}, "separate"),
        (
            *(f"{STEPS}.min_rollouts_per_window", 2),
            *({"strategy": "progressive", "num_steps": 2}, "decay"),
        ),
        ("backend.prefetch", 0, {"mesh": "no_shard"}, "full"),
        ("backend.defer_reduce", True, {"mesh": "no_shard"}, "full"),
    ],
)
def test_a_key_of_another_choice_is_told_with_both_ways_out(
    key: str, value: Any, other: dict[str, Any], reader: str
) -> None:
    block = key.rpartition(".")[0]
    beside = {f"{block}.{name}": chosen for name, chosen in other.items()}
    message = found({**TEN_STEPS, STEPS: {}, **beside, key: value}, key)
    assert f"Set {key}=" in message
    assert message.endswith(f"={reader}.")


@pytest.mark.parametrize(
    "overrides",
    [
        {STEPS: {"strategy": "list", "steps": [1]}},
        {STEPS: {"strategy": "progressive", "num_steps": 2, "window_stride": 2, "roll_back": True}},
        {"stack.scheduler.type": "cosine", "stack.scheduler.total_steps": 9},
        {"reward.on_failure": "retry", "reward.num_retries": 3},
        {"algorithm.reference": "ema", "algorithm.ema_decay": 0.5},
    ],
    ids=str,
)
def test_keys_of_the_choice_itself_are_fine(overrides: dict[str, Any]) -> None:
    told = {problem.key for problem in problems(run_config({**TEN_STEPS, **overrides}))}
    assert not told & overrides.keys()
    assert not any(key.startswith(f"{STEPS}.") for key in told)


@pytest.mark.parametrize(
    ("key", "value"),
    [("weight_sync_interval", 2), ("sync.verify", False)],
)
def test_keys_of_an_engine_with_weights_of_its_own_need_one(key: str, value: Any) -> None:
    message = found({key: value}, key)
    assert f"Set {key}=" in message
    assert message.endswith("rollout.engine=replica.")
    assert not found({key: value, "rollout.engine": "replica"}, key)


@pytest.mark.parametrize("value", [True, False])
def test_residency_keys_can_be_set_for_every_engine(value: bool) -> None:
    assert not found({"rollout_resident": value}, "rollout_resident")
    assert not found({"reward_resident": value}, "reward_resident")


def test_a_judge_has_no_weight() -> None:
    key = "eval_rewards.sharp.weight"
    for weight, is_told in ((2.0, True), (0.0, True), (1.0, False)):
        judges = {"eval_rewards": {"sharp": {"path": "jpeg_size", "weight": weight}}}
        assert bool(found(judges, key)) == is_told


def test_a_key_that_two_choices_leave_unread_is_told_once() -> None:
    key = f"{STEPS}.min_rollouts_per_window"
    told = problems(run_config({**TEN_STEPS, STEPS: {"strategy": "all"}, key: 2}))
    assert [problem.key for problem in told].count(key) == 1


def test_a_key_that_the_algorithm_never_reads_is_told_once() -> None:
    told = problems(run_config({"algorithm": {"path": "diffusion_nft", "ema_decay": 0.5}}))
    assert [p.key for p in told].count("algorithm.ema_decay") == 1


def test_a_kernel_of_evaluation_needs_noise_there() -> None:
    asked = {"eval_sampling.kernel": "cps"}
    assert "eval_eta=0 makes none" in found(asked, "eval_sampling.kernel")
    assert not found({**asked, "eval_eta": 0.3}, "eval_sampling.kernel")


@pytest.mark.parametrize(("per_start", "is_told"), [(2, True), (4, False), (None, False)])
def test_two_keys_that_say_which_samples_start_alike_must_agree(
    per_start: int | None, is_told: bool
) -> None:
    asked = {"sampling.samples_per_prompt": 4, "sampling.samples_per_start": per_start}
    message = found({**asked, "sampling.init_same_noise": True}, "sampling.init_same_noise")
    assert bool(message) == is_told
    assert not found(asked, "sampling.init_same_noise")


@pytest.mark.parametrize(
    ("overrides", "is_told"),
    [
        ({STEPS: {"strategy": "all"}}, True),
        ({STEPS: {"strategy": "all", "range": [0.0, 0.8]}}, False),
        ({STEPS: {"strategy": "all", "range": [0.0, 0.9]}}, True),
        ({STEPS: {"strategy": "list", "steps": [7]}}, False),
        ({STEPS: {"strategy": "list", "steps": [0, 8]}}, True),
        ({STEPS: {"strategy": "random", "num_steps": 8}}, False),
        ({STEPS: {"strategy": "window", "num_steps": 9}}, True),
        ({STEPS: {"strategy": "stratified"}, "sampling.samples_per_prompt": 8}, False),
        ({STEPS: {"strategy": "stratified"}, "sampling.samples_per_prompt": 9}, True),
        ({"algorithm.path": "diffusion_nft", **CLEAN}, False),
        ({"algorithm.path": "draft", **CLEAN}, True),
        ({"algorithm.path": "refl", "algorithm.start_range": [0.7, 1.0], **CLEAN}, False),
        ({"algorithm.path": "refl", "algorithm.start_range": [0.8, 1.0], **CLEAN}, True),
    ],
    ids=str,
)
def test_thinning_needs_steps_that_training_never_looks_at(
    overrides: dict[str, Any], is_told: bool
) -> None:
    asked = {**TEN_STEPS, "sampling.thin_after": 2, **overrides}
    assert bool(found(asked, "sampling.thin_after")) == is_told


def test_a_selection_that_cannot_be_made_is_told_by_itself() -> None:
    asked = {"sampling.thin_after": 2, STEPS: {"strategy": "list", "steps": [9]}}
    assert not found({**TEN_STEPS, **asked}, "sampling.thin_after")
    assert found({**TEN_STEPS, **asked}, f"{STEPS}.steps")
