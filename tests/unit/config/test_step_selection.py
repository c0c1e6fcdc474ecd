"""A selection of stochastic steps that cannot be made is a problem of the recipe."""

from __future__ import annotations

from typing import Any

import pytest

from unirl.config.geometry import stochastic_steps
from unirl.config.problem import Problem
from unirl.config.schema import RunConfig, SdeStepsConfig
from unirl.config.step_selection import selection_problems

BLOCK = "sampling.sde_steps"


def of_steps(total: int = 10, **values: Any) -> list[Problem]:
    return list(selection_problems(SdeStepsConfig.model_validate(values), total))


def of_run(**sampling: Any) -> list[Problem]:
    return list(stochastic_steps(RunConfig.model_validate({"sampling": sampling})))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"strategy": "random", "num_steps": 9},
        {"strategy": "window", "num_steps": 1, "range": [0.8, 1.0]},
        {"strategy": "progressive", "num_steps": 4, "window_pace": "decay", "roll_back": True},
        {"strategy": "stratified"},
        {"strategy": "list", "steps": [8, 0]},
    ],
    ids=str,
)
def test_what_can_be_selected_is_accepted(values: dict[str, Any]) -> None:
    assert of_steps(**values) == []


@pytest.mark.parametrize(
    ("values", "key", "fragments"),
    [
        ({"range": [0.5, 0.5]}, "range", ["[0.5, 0.5]", "0 <= start < end <= 1"]),
        ({"range": [0.9, 1.0]}, "range", ["[9, 9): none", "Widen it"]),
        ({"strategy": "random"}, "num_steps", ["is null", "9 steps", "strategy=all"]),
        ({"strategy": "window", "num_steps": 10}, "num_steps", ["is 10", "[0, 9): 9", "Lower it"]),
        (
            {"strategy": "progressive", "num_steps": 2, "window_pace": "decay"}
            | {"rollouts_per_window": 3, "min_rollouts_per_window": 4},
            "min_rollouts_per_window",
            ["is 4", "window_pace=decay", "rollouts_per_window=3"],
        ),
        ({"strategy": "stratified", "range": [0.9, 1.0]}, "range", ["none"]),
        ({"strategy": "list"}, "steps", ["is null", "strategy=list"]),
        ({"strategy": "list", "steps": []}, "steps", ["is empty"]),
        ({"strategy": "list", "steps": [1, 1]}, "steps", ["[1, 1]", "twice"]),
        ({"strategy": "list", "steps": [1, 9]}, "steps", ["[1, 9]", "0 to 9", "below 9"]),
        ({"strategy": "list", "steps": [30]}, "steps", ["[30]", "below 9"]),
    ],
    ids=str,
)
def test_what_cannot_be_selected_is_named_with_the_way_out(
    values: dict[str, Any], key: str, fragments: list[str]
) -> None:
    (problem,) = of_steps(**values)
    assert problem.key == f"{BLOCK}.{key}"
    assert all(fragment in problem.message for fragment in fragments), problem.message


def test_a_run_has_the_problems_of_its_steps_when_it_trains_on_them() -> None:
    steps = {"strategy": "list", "steps": [9]}
    (problem,) = of_run(sde_steps=steps, num_inference_steps=10)
    assert problem.key == f"{BLOCK}.steps"
    assert of_run(sde_steps=steps, num_inference_steps=11) == []


def test_steps_that_are_stochastic_without_being_trained_on_are_checked_too() -> None:
    values = {
        "algorithm": {"path": "diffusion_nft"},
        "sampling": {"eta": 0.7, "sde_steps": {"strategy": "random"}},
    }
    (problem,) = stochastic_steps(RunConfig.model_validate(values))
    assert problem.key == f"{BLOCK}.num_steps"


@pytest.mark.parametrize("kernel", ["cps", "ddim"])
def test_kernels_that_replace_noise_end_at_eta_one(kernel: str) -> None:
    (problem,) = of_run(kernel=kernel, eta=1.5)
    assert problem.key == "sampling.eta"
    assert f"kernel {kernel}" in problem.message
    assert of_run(kernel=kernel, eta=1.0) == []
    assert of_run(kernel="flash", eta=1.5) == []


def test_a_group_is_made_of_whole_starts() -> None:
    (problem,) = of_run(samples_per_prompt=8, samples_per_start=3)
    assert problem.key == "sampling.samples_per_start"
    assert "8 / sampling.samples_per_start 3 = 2.67 starts" in problem.message
    assert "Set it to 2 or 4" in problem.message
    assert of_run(samples_per_prompt=8, samples_per_start=4) == []
