"""Roles that are parked on two ranks: the same moves, of half the bytes, and the same numbers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from rank_pool import RankPool
from rank_runs import ROUNDING, SMOOTH, drift, sampling_numbers, train_on
from runs import GATE, REPLICA, Run, assert_same_state, compare_with_plan, read_json_lines

EVALUATE_AND_SAVE = (
    "batch_size=8",
    "eval_num_prompts=64",
    "eval_chunk_prompts=16",
    "eval_samples_per_prompt=1",
    "eval_sampling.num_inference_steps=2",
    "eval_interval=2",
    "save_interval=2",
)
"""The gate's arm 3, in fewer denoising steps."""


@pytest.fixture(scope="module")
def gates(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """The gate recipe, which parks every role, on 1 and 2 ranks."""
    folder = tmp_path_factory.mktemp("gates")
    return {
        n: train_on(pool, n, folder / f"on-{n}", *EVALUATE_AND_SAVE, recipe=GATE) for n in (1, 2)
    }


def test_the_gate_gives_the_published_counts_on_two_ranks(gates: dict[int, Run]) -> None:
    counts = Counter(gates[2].moves())
    assert [counts[f"{role} onload"] for role in ("train", "rollout", "reward")] == [3, 10, 10]
    assert gates[2].moves() == gates[1].moves()
    assert gates[2].logged_moves() == gates[2].moves()


def test_a_rank_moves_its_own_shards_only(gates: dict[int, Run]) -> None:
    one, two = (moved_bytes(gates[n], "train") for n in (1, 2))
    assert len(one) == len(two) > 4
    for whole, own in zip(one, two, strict=True):
        # Buffers, small and not sharded, are moved whole.
        assert 0.4 * whole < own < 0.6 * whole


def moved_bytes(run: Run, role: str) -> list[int]:
    """Of each transition of the role."""
    totals: Counter[int] = Counter()
    for row in read_json_lines(run.directory / "transitions.jsonl"):
        if row["role"] == role:
            totals[row["transition"]] += row["moved_bytes"] + row["dropped_bytes"]
    return list(totals.values())


BUSY = (
    *SMOOTH,
    "rollout.forward_batch_size=2",
    "eval_interval=2",
    "eval_samples_per_prompt=2",
    "eval_num_prompts=3",
    "save_interval=1",
)
SYNCS = {
    "adapter": (),
    "all weights": ("stack.lora=null", "stack.optimizer.learning_rate=1e-3"),
}


@pytest.mark.parametrize("sync", SYNCS)
def test_an_engine_of_its_own_samples_as_on_one_rank(
    pool: RankPool, tmp_path: Path, sync: str
) -> None:
    words = (*BUSY, *SYNCS[sync])
    one, two = (train_on(pool, n, tmp_path / f"on-{n}", *words, recipe=REPLICA) for n in (1, 2))
    for left, right in zip(one.rows()[:2], two.rows()[:2], strict=True):
        assert sampling_numbers(left) == sampling_numbers(right)
    # The engine follows: after the step its samples are those of nearly equal weights.
    last, other = one.rows("eval")[-1], two.rows("eval")[-1]
    assert other["eval/reward_mean"] == pytest.approx(last["eval/reward_mean"], abs=0.02)
    assert drift(one.weights(1), two.weights(1), one.weights(2)) < ROUNDING


def test_parking_all_roles_is_bit_identical_to_keeping_all_on_two_ranks(
    pool: RankPool, tmp_path: Path
) -> None:
    resident, parked = (
        train_on(
            pool,
            2,
            tmp_path / f"resident-{value}",
            *BUSY,
            *(f"{role}_resident={value}" for role in ("train", "rollout", "reward")),
            recipe=REPLICA,
        )
        for value in ("true", "false")
    )
    assert len(parked.moves()) > len(resident.moves())
    assert_same_state(resident, parked, step=2)
    assert resident.numbers() == parked.numbers()


@pytest.mark.parametrize("mesh", ["full", "no_shard"])
def test_ranks_that_search_their_moves_agree_and_do_what_the_plan_says(
    pool: RankPool, tmp_path: Path, mesh: str
) -> None:
    """In shards, a rank holds half of the trained network and the whole of the engine's."""
    policy, searched = (
        train_on(pool, 2, tmp_path / name, *BUSY, *words, f"backend.mesh={mesh}", recipe=REPLICA)
        for name, words in {"policy": (), "searched": SEARCHED}.items()
    )
    assert_same_state(policy, searched, step=2)
    assert policy.numbers() == searched.numbers()
    code, told = compare_with_plan(searched)
    assert code == 0, told


SEARCHED = (
    "residency=auto",
    "device_budget_gib=0.028",
    *(f"{role}_resident=null" for role in ("train", "rollout", "reward")),
)
