"""Whole runs of the forward-process algorithms: resume, residency, ranks, recorded pairs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image
from rank_pool import RankPool
from rank_runs import ROUNDING, SMOOTH, assert_close_rows, drift, train_on
from runs import REPLICA, Run, assert_equal_trees, assert_same_state, train, write_prompts
from safetensors.torch import load_file
from torch import Tensor

from unirl.core.types import PromptRecord
from unirl.reward.scorer import Scorer

CLEAN = ("sampling.eta=0", "sampling.init_same_noise=false")
"""Samples that differ by their start alone."""
NFT = (*CLEAN, "algorithm=diffusion_nft", "algorithm.old_decay_rate=0.2")
DPO = (*CLEAN, "algorithm=diffusion_dpo")
EMA_DPO = (*DPO, "algorithm.reference=ema", "algorithm.ema_decay=0.5")
AWM = (*CLEAN, "algorithm=awm", "stack.num_updates_per_batch=2")


def shadows(run: Run, step: int) -> dict[str, Tensor]:
    return load_file(run.checkpoint(step) / "shadows.safetensors")


# --- resume ---------------------------------------------------------------------------------------

SAVED = ("num_rollouts=4", "eval_interval=2", "save_interval=2")


@pytest.mark.parametrize("words", [NFT, EMA_DPO, AWM], ids=["nft", "dpo", "awm"])
def test_resuming_equals_never_stopping(tmp_path: Path, words: tuple[str, ...]) -> None:
    whole = train(tmp_path / "whole", *SAVED, *words)
    assert whole.exit_code == 0, whole.errors
    resumed = train(tmp_path / "again", *SAVED, *words, f"load_dir={whole.checkpoint(2)}")
    assert resumed.exit_code == 0, resumed.errors
    assert_same_state(whole, resumed, step=4)
    if words != AWM:
        assert_equal_trees(shadows(whole, 4), shadows(resumed, 4))
        assert not all(t.equal(shadows(whole, 2)[n]) for n, t in shadows(whole, 4).items())
    # Elsewhere the rows begin with the evaluation of the loaded weights.
    assert resumed.numbers() == whole.numbers()[3:]


def test_a_checkpoint_of_another_algorithm_is_refused_with_both_names(tmp_path: Path) -> None:
    grpo = train(tmp_path / "grpo", "num_rollouts=1", "save_interval=1")
    run = train(tmp_path / "nft", *NFT, f"load_dir={grpo.directory}")
    assert run.exit_code == 1
    for part in ("load_dir", "shadow weights none", "['old']"):
        assert part in run.errors


# --- residency ------------------------------------------------------------------------------------


def test_parked_engine_and_reward_train_nft_as_resident_ones_do(tmp_path: Path) -> None:
    words = (*NFT, "save_interval=2", "eval_interval=2")
    runs = [
        train(
            tmp_path / name,
            *words,
            f"rollout_resident={resident}",
            f"reward_resident={resident}",
            recipe=REPLICA,
        )
        for name, resident in (("parked", "false"), ("resident", "true"))
    ]
    assert [run.exit_code for run in runs] == [0, 0], runs[0].errors
    parked, resident = runs
    assert len(parked.moves()) > len(resident.moves())
    assert_same_state(parked, resident, step=2)
    assert_equal_trees(shadows(parked, 2), shadows(resident, 2))
    assert parked.numbers() == resident.numbers()
    shared = train(tmp_path / "shared", *words)
    assert_same_state(parked, shared, step=2)
    for rows in (own := parked.numbers(), common := shared.numbers()):
        for row in rows:
            del row["progress/denoiser_evaluations"]  # which counts the probes of a sync
    assert own == common


def test_parking_the_train_stack_that_holds_the_sampling_weights_is_refused(tmp_path: Path) -> None:
    run = train(tmp_path / "run", *NFT, "train_resident=false", recipe=REPLICA)
    assert run.exit_code == 3
    assert "samples with an EMA the train stack holds" in run.errors


# --- ranks ----------------------------------------------------------------------------------------

FOUR_PROMPTS = (
    *SMOOTH,
    "batch_size=4",
    "rollout.forward_batch_size=2",
    "save_interval=1",
    "stack.micro_batch_size=4",
)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The adapter before any step."""
    folder = tmp_path_factory.mktemp("start")
    run = train(folder / "run", "save_interval=1", "num_rollouts=1", "algorithm.adv_clip_max=1e-30")
    return run.weights(1)


@pytest.mark.parametrize("mesh", ["full", "no_shard"])
def test_two_ranks_train_nft_as_one_does(
    pool: RankPool, tmp_path: Path, start: dict[str, Tensor], mesh: str
) -> None:
    words = (*FOUR_PROMPTS, *NFT, "algorithm.kl_coefficient=0.01")
    one = train_on(pool, 1, tmp_path / "one", *words)
    two = train_on(pool, 2, tmp_path / "two", *words, f"backend.mesh={mesh}")
    for step in (1, 2):
        assert drift(one.weights(step), two.weights(step), start) < ROUNDING
    assert_close_rows(one.numbers(), two.numbers())
    whole, halves = shadows(one, 2), shadows(two, 2)
    old_start = {f"old.{name}": value for name, value in start.items()}
    assert drift(whole, halves, old_start) < ROUNDING


def test_a_rank_without_a_pair_takes_part_in_the_steps_of_the_others(
    pool: RankPool, tmp_path: Path, start: dict[str, Tensor]
) -> None:
    """Two prompts, a rank each; the second one's rewards are all equal."""
    scorer = "reward.scorers={ocr:null,color:null,own:{path:'test_forward_process_runs:Uneven'}}"
    prompts = write_prompts(tmp_path / "two.jsonl", ["100", "101"])
    words = (
        *SMOOTH,
        *DPO,
        scorer,
        f"data.train={prompts}",
        "num_rollouts=1",
        "sampling.samples_per_prompt=4",
        "save_interval=1",
        "stack.micro_batch_size=1",
    )
    one = train_on(pool, 1, tmp_path / "one", *words)
    two = train_on(pool, 2, tmp_path / "two", *words)
    assert one.rows("rollout")[0]["rollout/zero_std_group_ratio"] == 0.5
    assert one.rows("rollout")[0]["train/optimizer_step"] == 1
    assert drift(one.weights(1), two.weights(1), start) < ROUNDING
    one_rows, two_rows = one.numbers(), two.numbers()
    # A rank without a pair runs fillers, which are forwards all the same.
    evaluations = [rows[-1].pop("progress/denoiser_evaluations") for rows in (one_rows, two_rows)]
    assert evaluations[0] <= evaluations[1]
    assert_close_rows(one_rows, two_rows)


def test_a_window_in_which_no_rank_has_a_pair_is_skipped_by_all(
    pool: RankPool, tmp_path: Path
) -> None:
    scorer = "reward.scorers={ocr:null,color:null,own:{path:'test_forward_process_runs:Flat'}}"
    run = train_on(pool, 2, tmp_path / "two", *DPO, scorer)
    rows = run.rows("rollout")
    assert [row["train/skipped_steps"] for row in rows] == [1, 1]
    assert [row["train/optimizer_step"] for row in rows] == [0, 0]


# --- recorded pairs -------------------------------------------------------------------------------


def write_pairs(folder: Path, num_prompts: int) -> Path:
    """Prompts with a light and a dark image each, the light one preferred."""
    folder.mkdir(exist_ok=True)
    lines = []
    for number in range(num_prompts):
        names = [f"{number}-light.png", f"{number}-dark.png"]
        for name, grey in zip(names, (200 + number, 40 + number), strict=True):
            Image.new("RGB", (32, 16), (grey, grey, grey)).save(folder / name)
        prompt = f'the number "{100 + number}" in red on white'
        lines.append(json.dumps({"prompt": prompt, "metadata": {"images": names}}))
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(lines))
    return path


def offline(path: Path, *words: str) -> tuple[str, ...]:
    scorers = "reward.scorers={ocr:null,color:null,preference:{path:preference}}"
    return (
        *DPO,
        "rollout.engine=recorded",
        f"data.train={path}",
        scorers,
        *words,
    )


def test_a_run_on_recorded_pairs_learns_what_was_preferred(tmp_path: Path) -> None:
    words = offline(
        write_pairs(tmp_path / "pairs", 4),
        "num_rollouts=10",
        "stack.optimizer.learning_rate=3e-3",
        "algorithm.timesteps_per_sample=8",
        "algorithm.timestep_choice=random",
        "eval_interval=10",
        "save_interval=5",
        "+eval_rewards.light.path=test_forward_process_runs:Lightness",
    )
    run = train(tmp_path / "run", *words)
    assert run.exit_code == 0, run.errors
    rows = run.rows("rollout")
    assert [row["rollout/reward_mean"] for row in rows] == [0.5] * 10
    assert rows[0]["train/preference_accuracy"] == 0.5  # ties
    assert rows[-1]["train/preference_accuracy"] > 0.9
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    before, after = (row["eval/judge_light_mean"] for row in run.rows("eval"))
    assert after > before
    resumed = train(tmp_path / "again", *words, f"load_dir={run.checkpoint(5)}")
    assert_same_state(run, resumed, step=10)


def test_missing_images_are_reported_before_anything_loads(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "pairs", 4)
    (path.parent / "2-dark.png").unlink()
    run = train(tmp_path / "run", *offline(path, "model.family=sd3", f"model.path={tmp_path}"))
    assert run.exit_code == 3
    assert "line 3: metadata.images names" in run.errors


@pytest.mark.parametrize(
    ("words", "part", "exit_code"),
    [
        (("sampling.eta=0.7",), "sampling.eta", 3),
        (("algorithm=flow_grpo", "sampling.eta=0.7"), "algorithm.path", 3),
        (("sampling.samples_per_prompt=4",), "names 2 images", 1),
        (("data.eval=null", "eval_interval=2"), "names images", 1),
    ],
)
def test_what_recorded_images_cannot_do_is_refused(
    tmp_path: Path, words: tuple[str, ...], part: str, exit_code: int
) -> None:
    run = train(tmp_path / "run", *offline(write_pairs(tmp_path / "pairs", 4)), *words)
    assert run.exit_code == exit_code
    assert part in run.errors


# --- scorers --------------------------------------------------------------------------------------


class Flat(Scorer):
    """Nothing is better than anything."""

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        return torch.full((len(images),), 0.5)


class Lightness(Scorer):
    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        return images.float().mean(dim=(1, 2, 3)) / 255


class Uneven(Scorer):
    """Lightness for the number 100, the same for all else."""

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        light = images.float().mean(dim=(1, 2, 3)) / 255
        judged = torch.tensor([record.metadata["text"] == "100" for record in records])
        return light.where(judged, 0.5)
