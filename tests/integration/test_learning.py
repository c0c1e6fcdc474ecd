"""The point of it all: a run gets better at prompts that it never trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import train


@pytest.mark.slow
def test_training_raises_the_held_out_reward(tmp_path: Path) -> None:
    """Brightness is learnt within seconds; what the OCR reward reaches is in the docs."""
    run = train(
        tmp_path / "run",
        "reward.scorers={ocr:null,color:null,bright:{path:'failing_scorers:Brightness'}}",
        "num_rollouts=6",
        "batch_size=4",
        "sampling.samples_per_prompt=8",
        "stack.num_updates_per_batch=2",
        "stack.optimizer.learning_rate=2e-3",
        "eval_interval=6",
        "eval_num_prompts=16",
    )
    assert run.exit_code == 0, run.errors
    before, after = (row["eval/reward_mean"] for row in run.rows("eval"))
    assert after > before + 0.08
    rewards = [row["rollout/reward_mean"] for row in run.rows("rollout")]
    assert rewards[-1] > rewards[0] + 0.05
