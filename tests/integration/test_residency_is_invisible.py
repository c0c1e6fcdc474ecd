"""Parking roles changes where weights lie and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import REPLICA, assert_same_state, compare_with_plan, train

BUSY = ("num_rollouts=3", "eval_interval=1", "eval_chunk_prompts=2", "save_interval=3")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parking_all_roles_is_bit_identical_to_keeping_all(tmp_path: Path, precision: str) -> None:
    runs = [
        train(
            tmp_path / f"resident-{resident}",
            *(f"{role}_resident={resident}" for role in ("train", "rollout", "reward")),
            *BUSY,
            f"model.precision={precision}",
            recipe=REPLICA,
        )
        for resident in ("true", "false")
    ]
    resident, parked = runs
    assert len(parked.moves()) > len(resident.moves())
    assert_same_state(resident, parked, step=3)
    assert resident.numbers() == parked.numbers()


ALL_PARKED = ("train_resident=false", "rollout_resident=false", "reward_resident=false")
FREE = ("train_resident=null", "rollout_resident=null", "reward_resident=null")


@pytest.mark.parametrize(
    "where",
    [
        ("rollout.share_base=true", *(f"{r}_resident=false" for r in ("train", "reward"))),
        ("residency=auto", "device_budget_gib=0.03", *FREE),
        ("residency=auto", "device_budget_gib=10", *FREE),
        ("residency=auto", "device_budget_gib=0.03", "rollout.share_base=true", *FREE),
        ("overlap_moves=true", "device_budget_gib=1", *ALL_PARKED),
        ("overlap_moves=true", "device_budget_gib=1", "rollout.share_base=true", *ALL_PARKED),
    ],
    ids=[
        "shared base",
        "tight budget",
        "ample budget",
        "tight budget, shared base",
        "overlap",
        "overlap, shared base",
    ],
)
def test_where_weights_lie_changes_nothing_else(tmp_path: Path, where: tuple[str, ...]) -> None:
    resident = train(tmp_path / "resident", *BUSY, recipe=REPLICA)
    other = train(tmp_path / "other", *where, *BUSY, recipe=REPLICA)
    assert other.exit_code == 0, other.errors
    assert_same_state(resident, other, step=3)
    assert resident.numbers() == other.numbers()


@pytest.mark.parametrize("recipe", ["quickstart", REPLICA])
@pytest.mark.parametrize("weights", ["stack.lora={rank:4,alpha:8}", "stack.lora=null"])
def test_moments_that_come_only_for_the_step_change_nothing_else(
    tmp_path: Path, recipe: str, weights: str
) -> None:
    groups = ("sampling.samples_per_prompt=4", "stack.optimizer.learning_rate=1e-4")
    words = (weights, "stack.num_updates_per_batch=2", *groups, *BUSY)
    there = train(tmp_path / "there", *words, recipe=recipe)
    lent = train(tmp_path / "lent", "optimizer_resident=false", *words, recipe=recipe)
    assert lent.exit_code == 0, lent.errors
    assert_same_state(there, lent, step=3)
    assert there.numbers() == lent.numbers()
    assert [move for move in lent.moves() if "train" not in move] == [
        move for move in there.moves() if "train" not in move
    ]
    loans = [line for line in lent.lines() if line["cause"] == "optimizer step"]
    assert {line["component"] for line in loans} == {"train.moments"}
    # Out after each of six steps, in before each but the first, which makes them.
    assert [line["move"] for line in loans] == ["offload", *["onload", "offload"] * 5]
    assert all(line["moved_bytes"] > 0 for line in loans)
    code, told = compare_with_plan(lent)
    assert code == 0, told


def test_parking_is_bit_identical_with_full_weights(tmp_path: Path) -> None:
    resident, parked = (
        train(
            tmp_path / f"resident-{value}",
            f"rollout_resident={value}",
            f"reward_resident={value}",
            *BUSY,
            "stack.lora=null",
            recipe=REPLICA,
        )
        for value in ("true", "false")
    )
    assert "reward onload" in parked.moves()
    assert_same_state(resident, parked, step=3)
    assert resident.numbers() == parked.numbers()


def test_a_replica_trains_exactly_as_the_trainside_engine(tmp_path: Path) -> None:
    trainside = train(tmp_path / "trainside", *BUSY)
    replica = train(tmp_path / "replica", *BUSY, recipe=REPLICA)
    assert_same_state(trainside, replica, step=3)
    assert trainside.numbers() == replica.numbers()
