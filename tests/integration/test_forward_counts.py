"""No forward that is not needed: how often each recipe runs its network in a window.

One rollout of 8 samples, as 2 prompts x 4 unless it says else, of 4 steps. A sample costs one
forward per step, but samples of one start are one sample until their first stochastic step; a row
costs one forward and backward, and rows of equal states are one row; a replay or a reference costs
a forward more per row.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import command

from unirl.tracking.metrics import describe

SMALL_WINDOW = (
    "doctor=false",
    "num_threads=1",
    "num_rollouts=1",
    "stack.num_updates_per_batch=1",
    "eval_interval=0",
    "save_interval=0",
    "~eval_rewards",
)
GROUPS = ("batch_size=2", "sampling.samples_per_prompt=4")
PAIRS = ("batch_size=4", "sampling.samples_per_prompt=2")
SINGLES = ("batch_size=8", "sampling.samples_per_prompt=1")
BRANCHES = ("batch_size=1", "sampling.samples_per_prompt=8")
FIRST_TWO, FIRST = ("sampling.sde_steps.range=[0,0.5]",), ("sampling.sde_steps.range=[0,0.25]",)
SECOND = ("sampling.sde_steps.range=[0.25,0.5]", "sampling.sde_steps.num_steps=1")
SHARED, ALL = 2, 8
"""Distinct states of two shared starts, and of all samples."""


@pytest.mark.parametrize(
    ("recipe", "overrides", "sampling", "anchor", "rows"),
    [
        # Steps 0 and 1 are stochastic; the rollout's own log-probs are the anchor.
        ("quickstart", GROUPS, SHARED + 3 * ALL, 0, SHARED + ALL),
        ("tiny_flow_grpo", GROUPS, SHARED + 3 * ALL, 0, SHARED + 2 * ALL),
        # One stochastic step, the second: the states before it are shared.
        ("tiny_flow_grpo_fast", GROUPS + SECOND, 2 * SHARED + 2 * ALL, 0, SHARED),
        ("tiny_dance_grpo", GROUPS + FIRST_TWO, SHARED + 3 * ALL, 0, SHARED + ALL),
        ("tiny_mix_grpo", GROUPS, SHARED + 3 * ALL, 0, SHARED + ALL),
        # 8 steps, of the last 6 every second one.
        ("tiny_mix_grpo_flash", GROUPS, SHARED + 4 * ALL, 0, SHARED + ALL),
        # The old policy's means are replayed.
        ("tiny_grpo_guard", GROUPS, SHARED + 3 * ALL, SHARED + ALL, SHARED + ALL),
        ("tiny_flow_dppo", GROUPS, SHARED + 3 * ALL, SHARED + ALL, SHARED + ALL),
        # One row per sample, each from a start of its own.
        ("tiny_flash_grpo", GROUPS, 4 * ALL, 0, ALL),
        # Two starts with four branches each, which part at the first step.
        ("tiny_tempflow_grpo", BRANCHES + FIRST, SHARED + 3 * ALL, 0, SHARED),
        ("tiny_ddpo", GROUPS, SHARED + 3 * ALL, 0, SHARED + 2 * ALL),
        # Two levels per sample, and the old policy on each.
        ("tiny_diffusion_nft", GROUPS, 4 * ALL, 2 * ALL, 2 * ALL),
        ("tiny_awm", GROUPS, 4 * ALL, 2 * ALL, 2 * ALL),
        # Eight levels per pair, two samples each; and the reference.
        ("tiny_diffusion_dpo", GROUPS, 4 * ALL, 8 * 2 * 2, 8 * 2 * 2),
        # All four steps once more, with gradients; and one of them.
        ("tiny_draft", SINGLES, 4 * ALL, 0, 4 * ALL),
        ("tiny_refl", SINGLES, 4 * ALL, 0, ALL),
        # Two steps, and the teacher on each.
        ("tiny_distillation", PAIRS, 4 * ALL, 2 * ALL, 2 * ALL),
    ],
)
def test_a_window_runs_the_network_as_often_as_it_must(
    tmp_path: Path, recipe: str, overrides: tuple[str, ...], sampling: int, anchor: int, rows: int
) -> None:
    name = recipe if recipe == "quickstart" else f"diffusion/tiny/{recipe}"
    run = command("train", tmp_path / "run", name, *SMALL_WINDOW, *overrides)
    assert run.exit_code == 0, run.errors
    (row,) = run.rows("rollout")
    counted = (
        row["perf/rollout_denoiser_forwards"],
        row["perf/train_denoiser_forwards"],
        row["perf/train_denoiser_backwards"],
    )
    assert counted == (sampling, anchor + rows, rows)
    assert row["perf/total_denoiser_forwards"] == sampling + anchor + rows
    assert row["progress/denoiser_evaluations"] == sampling + anchor + rows
    assert row["progress/images"] == ALL
    assert all(describe(name).meaning for name in row if "/" in name)


@pytest.mark.parametrize(
    ("key", "sampling", "more_per_row"),
    [("sampling.guidance_scale=2", 2, 2), ("algorithm.kl_coefficient=0.01", 1, 2)],
)
def test_guidance_and_a_reference_cost_what_they_must(
    tmp_path: Path, key: str, sampling: int, more_per_row: int
) -> None:
    run = command("train", tmp_path / "run", "quickstart", *SMALL_WINDOW, *GROUPS, key)
    (row,) = run.rows("rollout")
    assert row["perf/rollout_denoiser_forwards"] == sampling * (SHARED + 3 * ALL)
    assert row["perf/train_denoiser_forwards"] == more_per_row * (SHARED + ALL)
    assert row["perf/train_denoiser_backwards"] == sampling * (SHARED + ALL)
