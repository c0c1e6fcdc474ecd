"""The five arms of the residency gate, with the public system's override lines and counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from runs import GATE, assert_same_state, command

FAST = ("sampling.num_inference_steps=4", "model.precision=fp32", "~eval_rewards")
"""Nothing that the counts depend on."""

OVERLAP = ("overlap_moves=true", "device_budget_gib=1")
CYCLE = [
    "train offload",
    "rollout onload",
    "rollout offload",
    "reward onload",
    "reward offload",
    "train onload",
]


@pytest.mark.parametrize(
    ("overrides", "onloads", "reward_offloads", "num_transitions", "checkpoints"),
    [
        ("", (2, 2, 2), 3, 13, []),
        ("train_resident=true reward_resident=true", (0, 2, 0), 0, 4, []),
        ("eval_interval=2 save_interval=2", (3, 10, 10), 11, 47, [2]),
        (
            "eval_interval=1 eval_num_prompts=24 eval_chunk_prompts=8 save_interval=2",
            (3, 11, 11),
            12,
            51,
            [2],
        ),
        (
            "accumulate_rollouts=2 stack.num_updates_per_batch=1 eval_interval=4 save_interval=4 "
            "eval_num_prompts=16 eval_chunk_prompts=8 num_rollouts=10",
            (7, 16, 16),
            17,
            79,
            [4, 8, 10],
        ),
    ],
    ids=["all-parked", "train-and-reward-resident", "evaluate-and-save", "chunks", "windows"],
)
@pytest.mark.parametrize("moves_overlap", [(), OVERLAP], ids=["release first", "overlap"])
def test_the_published_arms_hold(
    tmp_path: Path,
    moves_overlap: tuple[str, ...],
    overrides: str,
    onloads: tuple[int, int, int],
    reward_offloads: int,
    num_transitions: int,
    checkpoints: list[int],
) -> None:
    words = (*FAST, *moves_overlap, *overrides.split())
    run = command("train", tmp_path / "gate", GATE, *words)
    assert run.exit_code == 0, run.errors
    moves = run.moves()
    counts = Counter(moves)
    assert tuple(counts[f"{role} onload"] for role in ("train", "rollout", "reward")) == onloads
    assert counts["reward offload"] == reward_offloads
    assert len(moves) == num_transitions
    before_train = {moves[i - 1] for i, move in enumerate(moves) if move == "train onload"}
    assert before_train <= {"reward offload"}
    assert run.logged_moves() == moves
    assert run.checkpoints == sorted(f"checkpoint-{step}" for step in checkpoints)


LONG_ARM = (
    "accumulate_rollouts=2",
    "stack.num_updates_per_batch=1",
    "eval_interval=4",
    "save_interval=4",
    "eval_num_prompts=16",
    "eval_chunk_prompts=8",
    "num_rollouts=10",
)


def test_saves_from_the_host_cost_no_train_onload_and_save_the_same(tmp_path: Path) -> None:
    """Five windows, so 5 train onloads instead of 7 in the long arm."""
    device = command("train", tmp_path / "device", GATE, *FAST, *LONG_ARM)
    host = command("train", tmp_path / "host", GATE, *FAST, *LONG_ARM, "save_reads=host")
    assert Counter(device.moves())["train onload"] == 7
    assert Counter(host.moves())["train onload"] == 5
    for step in (4, 8, 10):
        assert_same_state(device, host, step)


def test_a_rollout_with_all_roles_parked_is_a_cycle_of_six_moves(tmp_path: Path) -> None:
    run = command("train", tmp_path / "gate", GATE, *FAST)
    assert run.moves() == [*CYCLE[:1], "reward offload", *CYCLE[1:], *CYCLE]
    assert "lifecycle residency: train offload, reward offload\n" in run.log
