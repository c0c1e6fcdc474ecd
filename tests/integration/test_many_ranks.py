"""The number of ranks changes neither what is sampled nor what a step does.

Sampling and scoring are equal bit for bit. Gradients are sums over ranks, so steps are equal but
for the order of additions; see `rank_runs.SMOOTH` for why the optimizer is a smooth one here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rank_pool import RankPool
from rank_runs import (
    ROUNDING,
    SMOOTH,
    assert_close_rows,
    drift,
    sampling_numbers,
    train_on,
)
from runs import Run, assert_same_state, contents, train
from torch import Tensor

from unirl.core.types import PromptRecord
from unirl.reward.scorer import Scorer
from unirl.tracking.evaluations import evaluation_file, read_evaluation

FOUR_PROMPTS = (
    *SMOOTH,
    "doctor=false",
    "batch_size=4",
    "rollout.forward_batch_size=2",
    "save_interval=1",
    "stack.micro_batch_size=4",
)
EVALUATED = (
    *FOUR_PROMPTS,
    "eval_interval=2",
    "eval_samples_per_prompt=2",
    "eval_num_prompts=5",
    "eval_chunk_prompts=3",
    "+eval_suites.few={data:'pkg:numbers/heldout.jsonl',num_prompts:4,scorers:{c:{path:color}}}",
)
"""5 prompts in chunks of 3 and 2: on 4 ranks each chunk is smaller than the number of ranks. The
suite has 4 prompts in chunks of 3 and 1."""

Runs = dict[int, Run]


@pytest.fixture(scope="module")
def by_ranks(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The same run on 1, 2 and 4 ranks: two rollouts, evaluated before and after."""
    folder = tmp_path_factory.mktemp("by-ranks")
    return {n: train_on(pool, n, folder / f"on-{n}", *EVALUATED) for n in (1, 2, 4)}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The adapter before any step."""
    folder = tmp_path_factory.mktemp("start")
    run = train(folder / "run", "save_interval=1", "num_rollouts=1", "algorithm.adv_clip_max=1e-30")
    return run.weights(1)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sampling_before_an_update_is_equal_bit_for_bit(by_ranks: Runs, num_ranks: int) -> None:
    for one, other in zip(by_ranks[1].rows()[:2], by_ranks[num_ranks].rows()[:2], strict=True):
        assert one["kind"] == other["kind"]
        assert len(sampling_numbers(one)) > 3
        assert sampling_numbers(one) == sampling_numbers(other)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_costs_are_those_of_all_ranks(by_ranks: Runs, num_ranks: int) -> None:
    for one, other in zip(by_ranks[1].rows(), by_ranks[num_ranks].rows(), strict=True):
        for cost in ("progress/images", "progress/denoiser_evaluations"):
            assert one[cost] == other[cost]
        seconds = other["progress/wall_seconds"]
        assert other["progress/device_seconds"] == pytest.approx(num_ranks * seconds)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_evaluation_images_are_equal_bit_for_bit(by_ranks: Runs, num_ranks: int) -> None:
    one, other = (
        contents(by_ranks[n].directory / "images" / "eval-000000") for n in (1, num_ranks)
    )
    assert len(one) == 5
    assert other == one


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("suite", "num_prompts"), [("eval", 5), ("few", 4)])
def test_every_prompt_of_a_suite_is_recorded_once_on_any_number_of_ranks(
    by_ranks: Runs, num_ranks: int, suite: str, num_prompts: int
) -> None:
    one, other = (
        (evaluation_file(by_ranks[n].directory, suite, 0)).read_bytes() for n in (1, num_ranks)
    )
    assert other == one
    samples = read_evaluation(evaluation_file(by_ranks[1].directory, suite, 0))
    assert [s.prompt for s in samples] == [p for p in range(num_prompts) for _ in range(2)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_set_that_does_not_divide_is_evaluated_once_a_prompt(
    by_ranks: Runs, num_ranks: int
) -> None:
    samples = [row["eval/num_samples"] for row in by_ranks[num_ranks].rows("eval")]
    assert samples == [5 * 2] * 2


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_step_is_equal_but_for_rounding(
    by_ranks: Runs, start: dict[str, Tensor], num_ranks: int
) -> None:
    one, many = by_ranks[1], by_ranks[num_ranks]
    for step in (1, 2):
        assert drift(one.weights(step), many.weights(step), start) < ROUNDING
    assert_close_rows(one.numbers(), many.numbers())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rows_are_written_once_and_completely(by_ranks: Runs, num_ranks: int) -> None:
    rows = by_ranks[num_ranks].rows()
    assert [row["kind"] for row in rows] == ["eval", "rollout", "rollout", "eval"]
    assert [row.keys() for row in rows] == [row.keys() for row in by_ranks[1].rows()]
    # The other ranks had nothing to warn of.
    assert list(by_ranks[num_ranks].directory.glob("logs/*")) == []


AWKWARD = {
    # 16 samples in 8 parts: each belongs to one prompt, so to one rank; the other needs fillers.
    "consecutive": ("stack.shuffle_updates=false", "adv_per_component=true"),
    "shuffled": ("stack.shuffle_updates=true", "adv_use_global_std=true"),
}


@pytest.mark.parametrize("kind", AWKWARD)
def test_parts_that_do_not_spread_evenly_take_the_same_steps(
    pool: RankPool, tmp_path: Path, start: dict[str, Tensor], kind: str
) -> None:
    words = (
        *FOUR_PROMPTS,
        *AWKWARD[kind],
        "num_rollouts=1",
        "sampling.samples_per_prompt=4",
        "stack.num_updates_per_batch=8",
        "stack.micro_batch_size=3",
    )
    one, two = (train_on(pool, n, tmp_path / f"on-{n}", *words) for n in (1, 2))
    one_rows, two_rows = one.numbers(), two.numbers()
    row = one_rows[-1]
    # Steps on a group with equal rewards are skipped, by all ranks alike.
    assert row["train/optimizer_step"] + row["train/skipped_steps"] == 8
    assert row["train/optimizer_step"] >= 4
    assert drift(one.weights(1), two.weights(1), start) < ROUNDING
    # A rank without a row of its own runs a filler, which is a forward all the same.
    evaluations = [rows[-1].pop("progress/denoiser_evaluations") for rows in (one_rows, two_rows)]
    assert evaluations[0] <= evaluations[1]
    assert_close_rows(one_rows, two_rows)


MESHES = {
    "hybrid": ("backend.mesh=hybrid", "backend.shard_size=2"),
    "no-shard": ("backend.mesh=no_shard",),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_all_meshes_train_alike(
    pool: RankPool, by_ranks: Runs, start: dict[str, Tensor], tmp_path: Path, mesh: str
) -> None:
    run = train_on(pool, 4, tmp_path / "run", *EVALUATED, *MESHES[mesh])
    assert drift(by_ranks[4].weights(2), run.weights(2), start) < ROUNDING
    assert_close_rows(by_ranks[4].numbers(), run.numbers())


INVISIBLE = {
    "unshard": ("rollout.unshard=true",),
    "recompute": ("backend.activation_checkpointing=true", "backend.prefetch=0"),
}


@pytest.mark.parametrize("kind", INVISIBLE)
def test_how_weights_are_gathered_and_kept_changes_no_bit(
    pool: RankPool, by_ranks: Runs, tmp_path: Path, kind: str
) -> None:
    run = train_on(pool, 2, tmp_path / "run", *EVALUATED, *INVISIBLE[kind])
    assert_same_state(by_ranks[2], run, step=2)
    assert by_ranks[2].numbers() == run.numbers()


def test_all_weights_in_bf16_arithmetic_train_alike(pool: RankPool, tmp_path: Path) -> None:
    words = (
        *FOUR_PROMPTS,
        "stack.lora=null",
        "model.precision=bf16",
        "stack.optimizer.learning_rate=1e-3",
    )
    one, two = (train_on(pool, n, tmp_path / f"on-{n}", *words) for n in (1, 2))
    first, other = one.rows("rollout")[0], two.rows("rollout")[0]
    assert sampling_numbers(first) == sampling_numbers(other)
    assert other["train/grad_norm"] == pytest.approx(first["train/grad_norm"], rel=0.02)
    # Step 2 starts from step 1's weights, so their difference is one step's move.
    assert drift(one.weights(1), two.weights(1), one.weights(2)) < 0.05


class NeedsNoGroup(Scorer):
    """Brightness; fails where a process group exists."""

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        assert not torch.distributed.is_initialized()
        return images.float().mean(dim=(1, 2, 3)) / 255


def test_one_process_makes_no_process_group(tmp_path: Path) -> None:
    scorer = "reward.scorers={ocr:null,color:null,own:{path:'test_many_ranks:NeedsNoGroup'}}"
    run = train(tmp_path / "run", "num_rollouts=1", scorer)
    assert run.exit_code == 0, run.errors
    assert not torch.distributed.is_initialized()


def test_no_process_group_is_left_behind(pool: RankPool, by_ranks: Runs) -> None:
    assert pool.run(2, torch.distributed.is_initialized) == [False, False]
