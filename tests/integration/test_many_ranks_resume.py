"""Checkpoints of many ranks: written in either format, resumed on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from rank_pool import RankPool
from rank_runs import SMOOTH, sampling_numbers, saved_shards, train_on
from runs import Run, assert_equal_trees, assert_same_state
from torch import Tensor

SAVED = (
    *SMOOTH,
    "batch_size=4",
    "rollout.forward_batch_size=2",
    "save_interval=1",
)
FORMATS = {1: "sharded", 2: "gathered", 4: "sharded"}
"""Number of ranks of the unbroken run -> how it saves."""

Runs = dict[int, Run]


@pytest.fixture(scope="module")
def unbroken(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two rollouts, saved after each."""
    folder = tmp_path_factory.mktemp("unbroken")
    return {
        n: train_on(pool, n, folder / f"on-{n}", *SAVED, f"save_format={form}")
        for n, form in FORMATS.items()
    }


def resumed(pool: RankPool, unbroken: Run, num_ranks: int, form: str, directory: Path) -> Run:
    """Taken up after the first rollout."""
    words = (f"load_dir={unbroken.checkpoint(1)}", f"save_format={form}")
    return train_on(pool, num_ranks, directory, *SAVED, *words)


@pytest.mark.parametrize("num_ranks", [2, 1])
def test_a_sharded_save_of_four_goes_on_with_fewer(
    pool: RankPool, unbroken: Runs, tmp_path: Path, num_ranks: int
) -> None:
    run = resumed(pool, unbroken[4], num_ranks, "gathered", tmp_path / "run")
    assert_goes_on(unbroken[4], run)


@pytest.mark.parametrize("num_ranks", [4, 1])
def test_a_gathered_save_of_two_goes_on_with_more_or_one(
    pool: RankPool, unbroken: Runs, tmp_path: Path, num_ranks: int
) -> None:
    run = resumed(pool, unbroken[2], num_ranks, "gathered", tmp_path / "run")
    assert_goes_on(unbroken[2], run)


def assert_goes_on(unbroken: Run, run: Run) -> None:
    """The next rollout is the same; a step on another number of ranks adds in another order."""
    [row] = run.rows("rollout")
    before = unbroken.rows("rollout")[1]
    assert sampling_numbers(row) == sampling_numbers(before)
    for name in ("train/grad_norm", "train/loss"):
        assert row[name] == pytest.approx(before[name], rel=1e-3, abs=1e-6)
    assert row["train/optimizer_step"] == 2
    assert "another setting" not in run.log


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_sharded_save_resumes_exactly_on_as_many_ranks(
    pool: RankPool, unbroken: Runs, tmp_path: Path, num_ranks: int
) -> None:
    run = resumed(pool, unbroken[num_ranks], num_ranks, "sharded", tmp_path / "run")
    assert_equal_trees(state(unbroken[num_ranks]), state(run))
    assert run.numbers() == unbroken[num_ranks].numbers()[1:]


def test_a_gathered_save_resumes_exactly_on_as_many_ranks(
    pool: RankPool, unbroken: Runs, tmp_path: Path
) -> None:
    run = resumed(pool, unbroken[2], 2, "gathered", tmp_path / "run")
    assert_same_state(unbroken[2], run, step=2)
    assert run.numbers() == unbroken[2].numbers()[1:]


def state(run: Run) -> Mapping[str, Tensor]:
    """Weights and moments of the last sharded checkpoint."""
    tensors = saved_shards(run.checkpoint(2))
    kinds = {name.split(".")[0] for name in tensors}
    assert kinds == {"weights", "exp_avg", "exp_avg_sq"}
    return tensors


def test_a_sharded_checkpoint_has_a_file_of_each_rank(unbroken: Runs) -> None:
    names = {path.name for path in (unbroken[4].checkpoint(1) / "shards").iterdir()}
    assert names == {".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}
    assert not (unbroken[4].checkpoint(1) / "weights.safetensors").exists()
    assert not (unbroken[2].checkpoint(1) / "shards").exists()
    assert unbroken[4].checkpoints == unbroken[2].checkpoints == ["checkpoint-1", "checkpoint-2"]
