"""What one rank refuses or fails at, all do, and the error names the rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from rank_pool import RankPool
from rank_runs import sampling_numbers, train_elsewhere, train_on
from runs import Run, train, write_prompts

from unirl.data.prompts import load_prompts
from unirl.data.stream import PromptStream

FAILS_ON_111 = (
    "reward.scorers={ocr:null,color:null,picky:{path:'failing_scorers:FailsOnOnePrompt'}}"
)


def started_differently(
    pool: RankPool, tmp_path: Path, words: Sequence[Sequence[str]], *common: str
) -> list[Run]:
    """Two ranks, each in a folder of its own; the run directory is an absolute path."""
    folders = [str(tmp_path / f"node-{rank}") for rank in range(2)]
    for folder in folders:
        Path(folder).mkdir(exist_ok=True)
    every = [["num_devices=2", *common, *own] for own in words]
    return pool.run(2, train_elsewhere, folders, every, tmp_path / "run")


def assert_refused(runs: Sequence[Run], *texts: str) -> None:
    """With exit code 3 on all ranks, the message on rank 0's, and nothing begun."""
    assert [run.exit_code for run in runs] == [3] * len(runs)
    shown = " ".join(runs[0].errors.split())
    for text in texts:
        assert text in shown
    assert not (runs[0].directory / "metrics.jsonl").exists()
    assert not (runs[0].directory / "config.yaml").exists()


def test_other_overrides_on_one_rank_are_refused(pool: RankPool, tmp_path: Path) -> None:
    words = [["stack.micro_batch_size=4"], ["stack.micro_batch_size=8"]]
    runs = started_differently(pool, tmp_path, words)
    assert_refused(runs, "stack.micro_batch_size is 4 on rank 0 and 8 on rank 1")
    assert not runs[0].directory.exists()


def test_another_prompt_file_on_one_rank_is_refused(pool: RankPool, tmp_path: Path) -> None:
    for rank, texts in enumerate([["123", "456"], ["123", "457"]]):
        (tmp_path / f"node-{rank}").mkdir()
        write_prompts(tmp_path / f"node-{rank}" / "prompts.jsonl", texts)
    runs = started_differently(pool, tmp_path, [[], []], "data.train=prompts.jsonl")
    assert_refused(runs, "content of data.train is", "on rank 1")


def test_another_number_of_devices_than_processes_is_refused(
    pool: RankPool, tmp_path: Path
) -> None:
    runs = started_differently(pool, tmp_path, [["num_devices=4"]] * 2, "batch_size=4")
    assert_refused(runs, "num_devices is 4, but the launcher started 2 processes")


def test_more_devices_than_the_one_process_that_was_started_are_refused(
    pool: RankPool, tmp_path: Path
) -> None:
    (run,) = pool.run(1, train, tmp_path / "run", "num_devices=2")
    assert_refused([run], "num_devices is 2, but the launcher started 1 process.")


def test_a_recipe_that_one_rank_does_not_see_is_refused_where_it_is_read(
    pool: RankPool, tmp_path: Path
) -> None:
    runs = started_differently(pool, tmp_path, [[], ["bogus=3"]])
    assert_refused(runs, "rank 1:", "bogus")


def test_a_checkpoint_that_one_rank_does_not_see_is_refused(pool: RankPool, tmp_path: Path) -> None:
    saved = train(tmp_path / "node-0" / "saved", "num_rollouts=1", "save_interval=1")
    assert saved.exit_code == 0
    runs = started_differently(pool, tmp_path, [[], []], "load_dir=saved")
    seen = tmp_path / "node-1" / "saved" / "checkpoints" / "checkpoint-1"
    assert_refused(runs, f"rank 1: {seen} is not there on this rank", "Set load_dir")


def test_a_folder_for_shards_that_one_rank_does_not_see_is_refused(
    pool: RankPool, tmp_path: Path
) -> None:
    words = ("save_dir=saved", "save_format=sharded", "save_interval=1")
    runs = started_differently(pool, tmp_path, [[], []], *words)
    seen = tmp_path / "node-1" / "saved"
    assert_refused(runs, f"rank 1: {seen} is not there on this rank", "Set save_dir")


def test_gathered_saves_need_their_folder_on_rank_0_only(pool: RankPool, tmp_path: Path) -> None:
    words = ("save_dir=saved", "save_interval=1", "num_rollouts=1")
    runs = started_differently(pool, tmp_path, [[], []], *words)
    assert [run.exit_code for run in runs] == [0, 0], runs[0].errors
    assert (tmp_path / "node-0" / "saved" / "checkpoint-1" / "weights.safetensors").exists()
    assert not (tmp_path / "node-1" / "saved").exists()


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return write_prompts(tmp_path / "prompts.jsonl", ["222", "111", "333", "444"])


def seed_with_111_on(rank: int, prompts: str) -> int:
    """A run seed whose first rollout gives prompt 111 to this one of two ranks."""
    records = load_prompts(Path(prompts), "data.train")

    def place(seed: int) -> int:
        texts = PromptStream(records, 4, seed).batch(0).texts
        return next(index for index, text in enumerate(texts) if "111" in text)

    return next(seed for seed in range(100) if place(seed) % 2 == rank)


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_reward_that_fails_on_one_rank_ends_all_with_its_error(
    pool: RankPool, tmp_path: Path, prompts: str, failing_rank: int
) -> None:
    words = (
        f"data.train={prompts}",
        f"seed={seed_with_111_on(failing_rank, prompts)}",
        "batch_size=4",
        FAILS_ON_111,
    )
    runs = pool.run(2, train, tmp_path / "run", "num_devices=2", *words)
    assert [run.exit_code for run in runs] == [1, 1]
    assert "scorer 'picky' failed: ValueError: cannot read 111" in runs[0].errors
    if failing_rank == 1:
        assert "rank 1: scorer 'picky'" in runs[0].errors
        log = (runs[0].directory / "logs" / "rank-1.log").read_text()
        assert "scorer 'picky' failed" in log
    assert runs[0].rows("rollout") == []


def test_groups_and_judges_that_fail_on_one_rank_are_left_out_on_all(
    pool: RankPool, tmp_path: Path, prompts: str
) -> None:
    words = (
        f"data.train={prompts}",
        "batch_size=4",
        "num_rollouts=1",
        "rollout.forward_batch_size=2",
        "eval_samples_per_prompt=2",
        "eval_interval=1",
        "data.eval=null",
        "reward.on_failure=drop_group",
        "+eval_rewards={sound:{path:'failing_scorers:Brightness'},"
        "choosy:{path:'failing_scorers:FailsOnOnePrompt'}}",
        FAILS_ON_111,
    )
    words = (*words, "doctor=false")  # which looks on one device only
    one, two = (train_on(pool, n, tmp_path / f"on-{n}", *words) for n in (1, 2))
    assert [row.keys() for row in one.rows()] == [row.keys() for row in two.rows()]
    for left, right in zip(one.rows()[:2], two.rows()[:2], strict=True):
        assert sampling_numbers(left) == sampling_numbers(right)
    [row] = two.rows("rollout")
    assert row["rollout/dropped_groups"] == 1
    assert row["train/grad_norm"] == pytest.approx(one.rows("rollout")[0]["train/grad_norm"])
    names = two.rows("eval")[0].keys()
    assert "eval/judge_sound_mean" in names
    assert "eval/judge_choosy_mean" not in names
