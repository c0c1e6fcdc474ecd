"""A misspelt key is answered with the key that was meant."""

from __future__ import annotations

import pytest

from unirl.config.keys import all_keys, suggest


def test_all_keys_reach_into_nullable_blocks_and_named_scorers() -> None:
    keys = all_keys()
    assert "stack.lora.rank" in keys
    assert "reward.scorers.<name>.weight" in keys
    assert "eval_rewards.<name>.path" in keys
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("micro_batch_size", "stack.micro_batch_size"),
        ("num_rollout", "num_rollouts"),
        ("stack.micro_batchsize", "stack.micro_batch_size"),
        ("lora.rank", "stack.lora.rank"),
        ("stack.optimizer.lr", "stack.optimizer.learning_rate"),
        ("group_size", "sampling.samples_per_prompt"),
        ("eval.num_inference_steps", "eval_sampling.num_inference_steps"),
        ("sampling.strategy", "sampling.sde_steps.strategy"),
    ],
)
def test_the_nearest_key_is_named(asked: str, meant: str) -> None:
    assert meant in suggest(asked)


def test_a_key_unlike_any_other_lists_its_block() -> None:
    assert (
        suggest("stack.lora.zzz")
        == "stack.lora has: rank, alpha, target_modules, use_rslora, use_dora."
    )


def test_a_key_unlike_any_other_outside_a_block_says_where_all_keys_are() -> None:
    assert "--cfg" in suggest("zzz")
