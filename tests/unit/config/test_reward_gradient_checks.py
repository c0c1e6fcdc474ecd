"""What cannot be asked of DRaFT, ReFL and distillation is said before anything loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from unirl.cli.compose import compose_and_check

NO_RATIO = [
    "algorithm.clip_range=1e-4",
    "algorithm.old_log_prob=replay",
    "adv_per_component=false",
]
ODE = [
    *NO_RATIO,
    "sampling.eta=0",
    "sampling.init_same_noise=false",
    "stack.num_updates_per_batch=1",
    "reward=ocr_ctc_color",
]
DRAFT = ["algorithm.path=draft", *ODE]
REFL = ["algorithm.path=refl", *ODE]
DISTIL = ["algorithm.path=distillation", *NO_RATIO]


def problems(*overrides: str) -> dict[str, str]:
    """Text by key, of the quickstart with these overrides."""
    _, found = compose_and_check("quickstart", ["~eval_rewards", *overrides])
    return {problem.key: problem.message for problem in found}


@pytest.mark.parametrize(
    ("overrides", "key", "fragments"),
    [
        ([*DRAFT, "reward=null", "eval_interval=0"], "reward", ["no scorers", "gradient"]),
        ([*DRAFT, "reward=ocr_color"], "reward.scorers.ocr", ["cannot be differentiated"]),
        ([*DRAFT, "reward_resident=false"], "reward_resident", ["is false", "while training"]),
        ([*REFL, "residency=auto", "layout=colocate"], "reward_resident", ["is null", "=true"]),
        ([*DRAFT, "sampling.eta=0.3"], "sampling.eta", ["is 0.3", "without noise", "eta=0"]),
        ([*REFL, "sampling.eta=0.3"], "sampling.eta", ["is 0.3", "refl", "eta=0"]),
        ([*DRAFT, "algorithm.last_steps=5"], "algorithm.last_steps", ["is 5", "is 4", "4 or less"]),
        ([*DRAFT, "sampling.solver=dpmpp_2m"], "sampling.solver", ["dpmpp_2m", "solver=euler"]),
        (
            [
                *DRAFT,
                "algorithm.random_last_steps=true",
                "accumulate_rollouts=2",
                "eval_interval=0",
                "save_interval=0",
            ],
            "accumulate_rollouts",
            ["is 2", "number of steps", "batch_size"],
        ),
        (
            [*REFL, "algorithm.start_range=[0.5,0.6]"],
            "algorithm.start_range",
            ["of 4 steps", "none"],
        ),
        ([*REFL, "algorithm.start_range=[0.9,0.1]"], "algorithm.start_range", ["none"]),
        (
            [*DRAFT, "sampling.init_same_noise=true"],
            "sampling.init_same_noise",
            ["16 samples one start", "init_same_noise=false"],
        ),
        (
            [*DRAFT, "sampling.samples_per_start=4"],
            "sampling.samples_per_start",
            ["4 samples one start", "samples_per_start=null"],
        ),
        ([*DISTIL], "algorithm.teachers", ["is empty", "algorithm.teachers.default="]),
        (
            [*DISTIL, "algorithm.teachers.default=runs/none"],
            "algorithm.teachers.default",
            ["runs/none", "no file"],
        ),
        (
            [*DISTIL, "algorithm.teachers.a-b=pkg:tiny/model.safetensors"],
            "algorithm.teachers.a-b",
            ["metric names"],
        ),
    ],
)
def test_rejected_with_the_key_and_the_way_out(
    overrides: list[str], key: str, fragments: list[str]
) -> None:
    found = problems(*overrides)
    assert list(found) == [key]
    for fragment in fragments:
        assert fragment in found[key]


@pytest.mark.parametrize(
    "overrides",
    [
        [*DRAFT, "algorithm.last_steps=4"],
        [*DRAFT, "sampling.samples_per_prompt=1", "algorithm.random_last_steps=true"],
        [*DRAFT, "eval_sampling.solver=dpmpp_2m"],
        [*DRAFT, "residency=auto", "layout=colocate", "reward_resident=true"],
        [*REFL, "algorithm.start_range=[0.25,0.5]", "sampling.thin_after=2"],
        [*REFL, "sampling.solver=dpmpp_2m"],
        [*REFL, "algorithm.start_range=[0.25,0.5]", "accumulate_rollouts=2", "eval_interval=0"],
        ["algorithm.path=flow_grpo", "reward_resident=false"],
    ],
)
def test_accepted(overrides: list[str]) -> None:
    assert problems("save_interval=0", *overrides) == {}


def test_a_checkpoint_folder_is_a_teacher_if_it_holds_weights(tmp_path: Path) -> None:
    ask = [*DISTIL, f"algorithm.teachers.default={tmp_path}"]
    assert "no file" in problems(*ask)["algorithm.teachers.default"]
    (tmp_path / "weights.safetensors").touch()
    assert problems(*ask) == {}
