"""Retired keys are refused for any value, with the way to write them now."""

from __future__ import annotations

import pytest

from unirl.config.retired import retired_keys
from unirl.config.validate import validate


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(
    ("key", "successor"),
    [
        ("enable_fsdp_offload", "train_resident"),
        ("offload_train_during_reward", "train_resident"),
        ("rollout_sleep_after_generate", "rollout_resident"),
    ],
)
def test_inverted_keys_are_refused_for_either_value(key: str, successor: str, value: bool) -> None:
    (problem,) = retired_keys({key: value})
    assert problem.key == key
    assert f"{key}=true is now {successor}=false" in problem.message
    assert f"{key}=false is now {successor}=true" in problem.message


@pytest.mark.parametrize(
    ("key", "written_now"),
    [
        ("eval_cfg_text_scale", "eval_sampling.guidance_scale"),
        ("eval_num_inference_steps", "eval_sampling.num_inference_steps"),
        ("eval_height", "eval_sampling.height"),
        ("eval_width", "eval_sampling.width"),
        ("eval_media_max_items", "logging.media_max_items"),
        ("eval_shift", "Remove it"),
        ("eval_mu", "Remove it"),
        ("num_samples_per_prompt", "sampling.samples_per_prompt"),
        ("cfg_text_scale", "sampling.guidance_scale"),
        ("stage_config", "Remove it"),
    ],
)
def test_renamed_keys_name_their_successor(key: str, written_now: str) -> None:
    (problem,) = retired_keys({key: 1})
    assert written_now in problem.message


def test_retired_keys_are_found_in_any_block_but_not_in_scorer_arguments() -> None:
    values = {
        "sampling": {"num_samples_per_prompt": 4},
        "eval_rewards": {"mine": {"path": "a:B", "args": {"eval_height": 3}}},
    }
    assert [problem.key for problem in retired_keys(values)] == ["sampling.num_samples_per_prompt"]


def test_a_retired_key_is_reported_once_and_not_as_unknown() -> None:
    (problem,) = validate({"enable_fsdp_offload": False}).problems
    assert "retired" in problem.message
