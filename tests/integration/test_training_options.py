"""Settings that change how a run samples, scores and trains, each seen to have its effect."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from runs import REPLICA, command, train, write_prompts

from unirl.config.schema import RunConfig, SdeStepsConfig
from unirl.samplers.window import select_sde_steps

OWN_SCORER = '''
from unirl.reward.scorer import Scorer


class Redness(Scorer):
    """Mean of the red channel, plus `offset`."""

    def __init__(self, offset: float) -> None:
        self._offset = offset

    def score(self, images, records):
        return self._offset + images[:, 0].float().mean(dim=(1, 2)) / 255
'''

OVERLAY = """
defaults:
  - /quickstart
  - _self_

description: My own overlay
reward:
  scorers:
    ocr: null
    color: null
    redness: {path: "my_rewards:Redness", weight: 2.0, args: {offset: 1.0}}
"""


def test_an_overlay_outside_the_repository_with_an_own_scorer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "my_overlay.yaml").write_text(OVERLAY)
    (tmp_path / "my_rewards.py").write_text(OWN_SCORER)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    run = train(tmp_path / "run", f"--config-dir={mine}", recipe="my_overlay")
    assert run.exit_code == 0, run.errors
    row = run.rows("rollout")[0]
    component, total = row["rollout/reward_redness_mean"], row["rollout/reward_mean"]
    assert 1 < component < 2
    assert total == pytest.approx(2 * component, rel=1e-6)
    assert not any("ocr" in name for name in row)


def test_stale_weights_are_sampled_until_the_next_sync(tmp_path: Path) -> None:
    """With an interval of 2, rollout 1 samples from the initial weights and rollout 2 does not."""
    settings = ("num_rollouts=4", "stack.optimizer.learning_rate=0.004")
    stale = train(tmp_path / "stale", "weight_sync_interval=2", *settings, recipe=REPLICA)
    fresh = train(tmp_path / "fresh", *settings, recipe=REPLICA)
    difference = "train/rollout_replay_log_prob_diff_max"
    stale_rows, fresh_rows = stale.rows("rollout"), fresh.rows("rollout")
    assert [row[difference] > 1e-3 for row in stale_rows] == [False, True, False, True]
    assert [row[difference] > 1e-3 for row in fresh_rows] == [False] * 4
    assert ["perf/sync_seconds" in row for row in stale_rows] == [False, False, True, False]
    frozen = train(tmp_path / "frozen", "stack.optimizer.learning_rate=1e-30", "num_rollouts=3")
    means = [
        [row["rollout/reward_color_mean"] for row in run.rows("rollout")] for run in (stale, frozen)
    ]
    assert means[0][:2] == means[1][:2]
    assert means[0][2] != means[1][2]


def test_a_resume_between_two_syncs_starts_with_a_sync(tmp_path: Path) -> None:
    settings = ("weight_sync_interval=4", "num_rollouts=3", "save_interval=1")
    whole = train(tmp_path / "run", *settings, recipe=REPLICA)
    loaded = f"load_dir={whole.checkpoint(2)}"
    resumed = train(tmp_path / "resumed", *settings, loaded, recipe=REPLICA)
    row = resumed.rows("rollout")[0]
    assert row["rollout"] == 2
    assert "perf/sync_seconds" in row
    assert row["train/rollout_replay_log_prob_diff_max"] < 1e-6


def test_accumulated_rollouts_train_in_one_step(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "num_rollouts=4", "accumulate_rollouts=2")
    rows = run.rows("rollout")
    assert [row["rollout"] for row in rows] == [1, 3]
    assert [row["optimizer_step"] for row in rows] == [1, 2]
    assert [row["rollout/num_samples"] for row in rows] == [8, 8]
    single = train(tmp_path / "single", "num_rollouts=1").rows("rollout")[0]
    assert rows[0]["rollout/reward_min"] <= single["rollout/reward_min"]


def test_several_updates_per_batch_move_the_ratio(tmp_path: Path) -> None:
    row = train(
        tmp_path / "run",
        "num_rollouts=1",
        "batch_size=4",
        "stack.num_updates_per_batch=4",
        "stack.optimizer.learning_rate=0.01",
    ).rows("rollout")[0]
    assert row["optimizer_step"] == row["train/optimizer_step"] == 4
    assert row["train/log_ratio_abs_max"] > 0


def test_the_engines_own_log_probs_as_anchor(tmp_path: Path) -> None:
    """Exactly 1 where sampling and training run the same batches."""
    row = train(
        tmp_path / "run",
        "num_rollouts=1",
        "algorithm.old_log_prob=rollout",
        "rollout.forward_batch_size=4",
        "stack.micro_batch_size=4",
    ).rows("rollout")[0]
    assert row["train/ratio_min"] == row["train/ratio_max"] == 1
    assert "train/rollout_replay_log_prob_diff_max" not in row


def test_the_kl_penalty_is_part_of_the_loss(tmp_path: Path) -> None:
    rows = train(tmp_path / "run", "algorithm.kl_coefficient=10").rows("rollout")
    assert rows[0]["train/kl_reference"] == 0
    assert rows[1]["train/kl_reference"] > 0
    penalty = rows[1]["train/loss"] - rows[1]["train/policy_loss"]
    assert penalty == pytest.approx(10 * rows[1]["train/kl_reference"], rel=0.02)


@pytest.mark.parametrize("recipe", ["quickstart", REPLICA])
def test_guidance_runs_in_sampling_and_training_alike(tmp_path: Path, recipe: str) -> None:
    settings = ("sampling.guidance_scale=2", "eval_interval=1")
    run = train(tmp_path / "guided", *settings, recipe=recipe)
    plain = train(tmp_path / "plain", "eval_interval=1", recipe=recipe)
    assert "cfg=2" in run.log
    for row in run.rows("rollout"):
        assert row["train/rollout_replay_log_prob_diff_max"] < 1e-5
    assert run.rows("eval")[0]["eval/color_mean"] != plain.rows("eval")[0]["eval/color_mean"]


@pytest.mark.parametrize("kernel", ["flow", "dance", "cps"])
def test_each_kernel_trains(tmp_path: Path, kernel: str) -> None:
    settings = (f"sampling.kernel={kernel}", "sampling.sde_steps.range=[0,1]")
    rows = train(tmp_path / "run", *settings).rows("rollout")
    assert rows[0]["train/ratio_min"] == rows[0]["train/ratio_max"] == 1
    assert all(row["train/grad_norm"] > 0 for row in rows)
    assert all(row["train/rollout_replay_log_prob_diff_max"] < 1e-3 for row in rows)


@pytest.mark.parametrize(
    ("strategy", "keys"),
    [("random", {}), ("window", {}), ("progressive", {"rollouts_per_window": 1})],
)
def test_each_choice_of_stochastic_steps_trains(
    tmp_path: Path, strategy: str, keys: dict[str, int]
) -> None:
    values = {"strategy": strategy, "range": [0, 1], "num_steps": 2, **keys}
    settings = [f"sampling.sde_steps.{key}={value}" for key, value in values.items()]
    run = train(tmp_path / "run", *settings)
    assert all(row["train/grad_norm"] > 0 for row in run.rows("rollout"))
    config, seed = SdeStepsConfig.model_validate(values), RunConfig().seed
    chosen = {select_sde_steps(config, 4, rollout, seed, 2, 1) for rollout in range(20)}
    assert len(chosen) > 1


def test_evaluation_can_sample_with_noise_and_stays_repeatable(tmp_path: Path) -> None:
    settings = ("eval_interval=1", "stack.optimizer.learning_rate=1e-30", "num_rollouts=1")
    noisy = train(tmp_path / "noisy", "eval_eta=0.7", *settings)
    plain = train(tmp_path / "plain", *settings)
    assert "eta=0.7" in noisy.log
    before, after = (row["eval/color_mean"] for row in noisy.rows("eval"))
    assert before == after
    assert before != plain.rows("eval")[0]["eval/color_mean"]


def test_evaluation_has_sampling_settings_of_its_own(tmp_path: Path) -> None:
    settings = ("eval_sampling.num_inference_steps=6", "eval_sampling.guidance_scale=3")
    run = train(tmp_path / "run", "num_rollouts=1", "eval_interval=1", *settings)
    assert "(1 samples/prompt, 6 steps, 32x16, cfg=3 eta=0)" in run.log


def test_chunks_do_not_change_the_evaluation(tmp_path: Path) -> None:
    settings = (
        "num_rollouts=1",
        "eval_interval=1",
        "eval_num_prompts=5",
        "eval_samples_per_prompt=2",
    )
    one, many = (
        train(tmp_path / name, *settings, f"eval_chunk_prompts={size}").rows("eval")[0]
        for name, size in [("one", 5), ("many", 2)]
    )
    assert one["eval/num_samples"] == many["eval/num_samples"] == 10
    assert one["eval/color_mean"] == pytest.approx(many["eval/color_mean"], abs=1e-3)


def test_a_failing_group_is_dropped_and_never_counted_as_zero(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", ["111", "222", "333"])
    run = train(
        tmp_path / "run",
        f"data.train={prompts}",
        "batch_size=3",
        "reward.on_failure=drop_group",
        "reward.scorers={ocr:null,color:null,own:{path:'failing_scorers:FailsOnOnePrompt'}}",
    )
    assert run.exit_code == 0, run.errors
    for row in run.rows("rollout"):
        assert row["rollout/dropped_groups"] == 1
        assert row["rollout/num_samples"] == 6
        assert row["rollout/reward_min"] > 0.1
        assert row["train/grad_norm"] > 0


def test_a_scorer_that_fails_now_and_then_is_asked_again(tmp_path: Path) -> None:
    run = train(
        tmp_path / "run",
        "reward.on_failure=retry",
        "reward.retry_seconds=0.01",
        "reward.scorers={ocr:null,color:null,own:{path:'failing_scorers:FailsEverySecondTime'}}",
    )
    assert run.exit_code == 0, run.errors
    assert run.log.count("TimeoutError: no answer. Fix it") == 2
    assert run.log.count("Traceback") == 2


def test_a_judge_that_fails_costs_its_number_and_not_the_run(tmp_path: Path) -> None:
    run = train(
        tmp_path / "run",
        "num_rollouts=1",
        "eval_interval=1",
        "eval_rewards={bad:{path:'failing_scorers:Raises'},good:{path:color}}",
    )
    assert run.exit_code == 0, run.errors
    row = run.rows("eval")[0]
    assert "eval/judge_good_mean" in row
    assert "eval/judge_bad_mean" not in row
    assert "warning: judge left out" in run.output


def test_the_rollout_engine_can_stay_awake(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "rollout_resident=true", "eval_interval=1", recipe=REPLICA)
    assert run.moves() == ["rollout onload"]


def test_every_shipped_recipe_of_the_tiny_model_runs(tmp_path: Path) -> None:
    for recipe in ("tiny_full", "tiny_ocr_only"):
        run = train(tmp_path / recipe, recipe=f"diffusion/tiny/{recipe}")
        assert run.exit_code == 0, run.errors


def test_check_and_train_agree_on_a_good_recipe(tmp_path: Path) -> None:
    assert command("check", tmp_path / "run", "quickstart", "seed=3").exit_code == 0
    assert not (tmp_path / "run").exists()
