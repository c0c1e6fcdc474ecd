"""The point of it all: a short run gets better at prompts that it never trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import command


@pytest.mark.slow
def test_training_raises_the_held_out_reward(tmp_path: Path) -> None:
    run = command(
        "train",
        tmp_path / "run",
        "quickstart",
        "num_rollouts=8",
        "eval_interval=8",
        "eval_num_prompts=128",
        "eval_chunk_prompts=64",
        "save_interval=0",
        "seed=0",
    )
    assert run.exit_code == 0, run.errors
    before, after = run.rows("eval")
    assert after["eval/reward_mean"] > before["eval/reward_mean"] + 0.03
    assert after["eval/ocr_mean"] > before["eval/ocr_mean"] + 0.05
    assert after["eval/color_mean"] > before["eval/color_mean"] - 0.03
