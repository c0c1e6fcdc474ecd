"""DRaFT, ReFL and distillation by the command line, from recipe to checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rank_pool import RankPool
from rank_runs import ROUNDING, SMOOTH, drift, train_on
from runs import REPLICA, SMALL, Run, assert_same_state, command, train
from safetensors.torch import save_file

NO_RATIO = (
    "algorithm.clip_range=1e-4",
    "algorithm.old_log_prob=replay",
    "adv_per_component=false",
    "save_interval=1",
)
COLOR = (
    *NO_RATIO,
    "reward.scorers.ocr=null",
    "sampling.eta=0",
    "sampling.init_same_noise=false",
    "algorithm.kl_coefficient=0.1",
)
DRAFT = ("algorithm.path=draft", "algorithm.last_steps=2", *COLOR)
REFL = ("algorithm.path=refl", "algorithm.start_range=[0.25,1.0]", *COLOR)
DISTILLATION = ("algorithm.path=distillation", *NO_RATIO)
COLORS = ("red", "green", "blue", "black", "purple", "orange")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = train(tmp_path_factory.mktemp("teacher") / "run", "save_interval=2", "seed=3")
    assert run.exit_code == 0, run.errors
    return run


def taught_by(teacher: Run) -> tuple[str, ...]:
    return (*DISTILLATION, f"algorithm.teachers.default={teacher.checkpoint(2)}")


@pytest.mark.parametrize("keys", [DRAFT, REFL], ids=["draft", "refl"])
def test_the_reward_is_differentiated_and_moves_the_weights(
    tmp_path: Path, keys: tuple[str, ...]
) -> None:
    run = train(tmp_path / "run", *keys)
    assert run.exit_code == 0, run.errors
    first, second = run.rows("rollout")
    assert first["train/grad_norm"] > 0
    assert first["train/velocity_deviation"] == 0, "B is 0 at the start"
    assert second["train/velocity_deviation"] > 0
    assert 0 <= first["train/reward_mean"] <= 1
    assert "train/ratio_mean" not in first
    moved = (run.weights(2)[name] - run.weights(1)[name] for name in run.weights(1))
    assert any(difference.any() for difference in moved)


def test_drafts_reward_is_the_rollouts_but_for_the_rounding_of_pixels(tmp_path: Path) -> None:
    (row,) = train(tmp_path / "run", *DRAFT, "num_rollouts=1").rows("rollout")
    assert row["train/reward_mean"] == pytest.approx(row["rollout/reward_mean"], abs=1e-3)


@pytest.mark.parametrize("keys", [DRAFT, REFL], ids=["draft", "refl"])
def test_an_engine_of_its_own_changes_nothing(tmp_path: Path, keys: tuple[str, ...]) -> None:
    own = train(tmp_path / "own", *keys, recipe=REPLICA)
    assert own.exit_code == 0, own.errors
    assert_same_state(own, train(tmp_path / "shared", *keys), 2)


def test_a_scorer_without_a_gradient_is_named(tmp_path: Path) -> None:
    run = train(tmp_path / "run", *DRAFT, "reward.scorers.size.path=jpeg_size")
    assert run.exit_code == 3
    assert "jpeg_size, which cannot be differentiated" in " ".join(run.errors.split())


def test_a_resumed_run_draws_the_same_steps(tmp_path: Path) -> None:
    keys = (*DRAFT, "algorithm.last_steps=4", "algorithm.random_last_steps=true")
    whole = train(tmp_path / "whole", *keys, "num_rollouts=4")
    half = train(tmp_path / "half", *keys, "num_rollouts=2")
    rest = train(tmp_path / "rest", *keys, "num_rollouts=4", f"load_dir={half.checkpoint(2)}")
    assert rest.exit_code == 0, rest.errors
    assert_same_state(whole, rest, 4)


def test_a_student_learns_from_a_checkpoint(tmp_path: Path, teacher: Run) -> None:
    run = train(tmp_path / "run", *taught_by(teacher), "num_rollouts=8", "batch_size=4")
    assert run.exit_code == 0, run.errors
    kl = [row["train/kl_teacher"] for row in run.rows("rollout")]
    assert kl[-1] < 0.7 * kl[0]


def test_a_student_needs_no_reward(tmp_path: Path, teacher: Run) -> None:
    run = train(tmp_path / "run", *taught_by(teacher), "reward=null", "adv_per_component=false")
    assert run.exit_code == 0, run.errors
    first, second = run.rows("rollout")
    assert second["train/kl_teacher"] > 0
    assert first["train/grad_norm"] > 0


def test_several_teachers_can_be_planned(tmp_path: Path, teacher: Run) -> None:
    two = (*taught_by(teacher), f"algorithm.teachers.other={teacher.checkpoint(2)}")
    plan = command("plan", tmp_path / "run", "quickstart", *SMALL, *two)
    assert plan.exit_code == 0, plan.errors
    assert "train.teacher-default" in plan.output
    assert "train.teacher-other" in plan.output


def test_prompts_without_a_teacher_are_refused_before_the_run(tmp_path: Path, teacher: Run) -> None:
    shutil.copy(teacher.checkpoint(2) / "weights.safetensors", tmp_path / "other.safetensors")
    two = (*taught_by(teacher), f"algorithm.teachers.other={tmp_path / 'other.safetensors'}")
    run = train(tmp_path / "run", *two)
    assert run.exit_code != 0
    assert "metadata.domain" in run.errors
    assert not run.rows()


def test_two_ranks_ask_the_teachers_of_shards_equally_often(
    pool: RankPool, tmp_path: Path, teacher: Run
) -> None:
    """Forwards of shards are collective, and ranks have prompts of different domains."""
    opposite = {name: -tensor for name, tensor in teacher.weights(2).items()}
    save_file(opposite, tmp_path / "opposite.safetensors")
    files = {color: teacher.checkpoint(2) for color in COLORS}
    files["red"] = files["green"] = files["blue"] = tmp_path / "opposite.safetensors"
    keys = (
        *SMOOTH,
        *DISTILLATION,
        "algorithm.teacher_key=text_color",
        *(f"algorithm.teachers.{color}={file}" for color, file in files.items()),
    )
    one, two = (train_on(pool, n, tmp_path / f"on-{n}", *keys) for n in (1, 2))
    still = train_on(pool, 1, tmp_path / "still", *keys, "stack.optimizer.learning_rate=1e-30")
    assert drift(two.weights(2), one.weights(2), still.weights(1)) < ROUNDING
