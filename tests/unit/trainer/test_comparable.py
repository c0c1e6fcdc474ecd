"""Which settings make two evaluations differ by more than the weights."""

from __future__ import annotations

from typing import Any

import pytest
from builders import run_config

from unirl.checkpoint.state import TrainerState
from unirl.trainer.comparable import evaluation_changes

BASE = {"eval_interval": 1, "eval_rewards": {"taste": {"path": "color"}}}


def changes(after: dict[str, Any], **identity: str) -> tuple[str, ...]:
    saved = run_config(BASE).model_dump(mode="json")
    known = {f"content of {key}": "a" for key in ("data.train", "data.eval", "model.path")}
    state = TrainerState(2, 2, None, saved, identity=known)
    return evaluation_changes(state, run_config(BASE | after), known | identity)


@pytest.mark.parametrize(
    ("after", "key"),
    [
        ({"seed": 3}, "seed"),
        ({"eval_num_prompts": 5}, "eval_num_prompts"),
        ({"eval_samples_per_prompt": 3}, "eval_samples_per_prompt"),
        ({"eval_sampling.num_inference_steps": 9}, "eval_sampling.num_inference_steps"),
        ({"sampling.guidance_scale": 2.0}, "eval_sampling.guidance_scale"),
        ({"reward.scorers": {"color": {"path": "color", "weight": 0.3}}}, "reward.color"),
        ({"eval_rewards": {"taste": {"path": "ocr"}}}, "eval_rewards.taste.path"),
        (
            {"eval_rewards": {"taste": {"path": "color", "args": {"x": 1}}}},
            "eval_rewards.taste.args",
        ),
    ],
)
def test_what_is_sampled_and_scored_counts(after, key):
    assert any(line.startswith(key) for line in changes(after))


@pytest.mark.parametrize(
    "after",
    [
        {"stack.optimizer.learning_rate": 0.5, "num_rollouts": 99, "batch_size": 3},
        {"sampling.samples_per_prompt": 4, "sampling.eta": 0.1, "algorithm.clip_range": 0.5},
        {"eval_rewards": {"taste": {"path": "color"}, "more": {"path": "ocr"}}},
        {"eval_rewards": {}},
        {"eval_interval": 7, "output_dir": "elsewhere"},
    ],
)
def test_what_only_trains_or_adds_or_leaves_out_a_judge_does_not(after):
    assert changes(after) == ()


def test_other_content_of_what_is_evaluated_counts():
    name = "content of data.train"  # which is evaluated, without data.eval
    assert changes({}, **{name: "b"}) == (f"{name}: a -> b",)
    assert changes({}, **{"content of data.eval": "b"}) == ()
    assert changes({}, **{"content of model.path": "b"}) == ("content of model.path: a -> b",)


def test_a_configuration_of_another_version_is_no_base_for_a_comparison():
    state = TrainerState(2, 2, None, {"no_such_key": 1})
    assert "another version" in evaluation_changes(state, run_config(BASE), {})[0]
