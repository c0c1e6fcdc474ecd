"""Values become a configuration, or every problem they have."""

from __future__ import annotations

from typing import Any

import pytest

from unirl.config.schema import RunConfig
from unirl.config.validate import validate


def test_the_defaults_themselves_are_valid() -> None:
    result = validate(RunConfig().model_dump())
    assert result.problems == ()
    assert result.config == RunConfig()


def test_wrong_keys_are_left_out_and_the_rest_is_kept() -> None:
    result = validate({"batch_size": "many", "num_rollouts": 7, "stack": {"foo": 1}})
    assert {problem.key for problem in result.problems} == {"batch_size", "stack.foo"}
    assert result.config.num_rollouts == 7
    assert result.config.batch_size == RunConfig().batch_size


@pytest.mark.parametrize(
    ("values", "key", "fragments"),
    [
        ({"batch_size": 0}, "batch_size", ["is 0", "greater than or equal to 1"]),
        ({"batch_size": 1.5}, "batch_size", ["is 1.5", "valid integer"]),
        ({"batch_size": True}, "batch_size", ["is true", "not a switch"]),
        ({"batch_size": None}, "batch_size", ["is null"]),
        ({"eval_eta": float("inf")}, "eval_eta", ["finite"]),
        ({"eval_eta": float("nan")}, "eval_eta", ["finite"]),
        ({"train_resident": "maybe"}, "train_resident", ["maybe", "boolean"]),
        ({"sampling": {"kernel": "ddpm"}}, "sampling.kernel", ["ddpm", "or 'ddim'"]),
        ({"sampling": {"sde_steps": {"range": "[0,1]"}}}, "sampling.sde_steps.range", ["list"]),
        ({"sampling": {"sde_steps": {"range": [0, "x"]}}}, "sampling.sde_steps.range", ["number"]),
        ({"sampling": {"sde_steps": {"range": [0]}}}, "sampling.sde_steps.range", ["at least 2"]),
        ({"stack": 3}, "stack", ["is 3", "block of keys"]),
        ({"stack": {"lora": "yes"}}, "stack.lora", ["block of keys"]),
        ({"eval_rewards": {"judge": {"weight": 2}}}, "eval_rewards.judge.path", ["must be set"]),
        ({"model": {"paht": "x"}}, "model.paht", ["not a key", "model.path"]),
        ({"lora": {"rank": 4}}, "lora.rank", ["not a key", "stack.lora.rank"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    values: dict[str, Any], key: str, fragments: list[str]
) -> None:
    (problem,) = validate(values).problems
    assert problem.key == key
    for fragment in fragments:
        assert fragment in problem.message


def test_text_from_the_environment_counts_as_number_and_number_as_text() -> None:
    result = validate({"batch_size": "4", "run_name": 7})
    assert result.problems == ()
    assert result.config.batch_size == 4
    assert result.config.run_name == "7"


def test_a_null_scorer_is_left_out() -> None:
    values = {
        "reward": {"scorers": {"ocr": {"path": "ocr"}, "color": None}},
        "eval_rewards": {"judge": None},
    }
    result = validate(values)
    assert result.problems == ()
    assert result.config.reward is not None
    assert list(result.config.reward.scorers) == ["ocr"]
    assert result.config.eval_rewards == {}


def test_validation_leaves_the_given_values_alone() -> None:
    values = {"eval_rewards": {"judge": None}, "foo": 1}
    validate(values)
    assert values == {"eval_rewards": {"judge": None}, "foo": 1}
