"""Settings that differ, and a command that repeats a run."""

from __future__ import annotations

import shlex
from pathlib import Path

from report_runs import PROMPTS, write_run

from unirl.cli.compose import compose
from unirl.report.reading import read_run
from unirl.report.settings import (
    between,
    command,
    evaluated_differently,
    from_defaults,
    learns_the_same,
)


def test_only_what_differs_from_the_defaults_is_told(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", config={"stack": {"lora": {"rank": 8}}}))
    found = {setting.key: setting.values for setting in from_defaults(run)}
    assert found["stack.lora.rank"] == ("8", "–")
    assert found["num_rollouts"] == ("12", "100")
    assert "stack.lora" not in found
    assert "seed" not in found


def test_where_a_run_goes_is_neutral_and_comes_last(tmp_path: Path) -> None:
    one, other = (
        read_run(write_run(tmp_path / name, seed=seed)) for name, seed in (("a", 0), ("b", 1))
    )
    settings = between([one, other])
    assert [(s.key, s.is_neutral) for s in settings] == [("seed", False), ("run_name", True)]
    assert learns_the_same(one, other)


def test_runs_that_were_evaluated_differently_are_told_by_which_keys(tmp_path: Path) -> None:
    plain = {"sampling": {"num_inference_steps": 10}}
    fewer = {"sampling": {"num_inference_steps": 6}}
    equal = {**fewer, "eval_sampling": {"num_inference_steps": 10}}
    one, other, same = (
        read_run(write_run(tmp_path / name, config=config))
        for name, config in (("one", plain), ("other", fewer), ("same", equal))
    )
    assert evaluated_differently([one, other]) == ["eval_sampling.num_inference_steps"]
    assert evaluated_differently([one, same]) == []


def test_other_prompts_under_the_same_path_are_told(tmp_path: Path) -> None:
    one, fewer, other = (
        read_run(write_run(tmp_path / name, prompts=prompts))
        for name, prompts in (("one", PROMPTS), ("fewer", PROMPTS[:2]), ("other", PROMPTS[1:]))
    )
    assert evaluated_differently([one, fewer]) == []
    assert evaluated_differently([one, other]) == ["content of data.eval"]


def test_the_seed_and_shared_judges_are_part_of_an_evaluation(tmp_path: Path) -> None:
    judge = {"path": "exact_read", "weight": 1.0}
    one, other, more = (
        read_run(write_run(tmp_path / name, seed=seed, config={"eval_rewards": judges}))
        for name, seed, judges in (
            ("one", 0, {"read": judge}),
            ("other", 1, {"read": {**judge, "path": "ocr"}}),
            ("more", 0, {"read": judge, "second": {"path": "second_ocr"}}),
        )
    )
    assert evaluated_differently([one, other]) == ["seed", "eval_rewards.read.path"]
    assert evaluated_differently([one, more]) == []


def test_the_kernel_matters_to_an_evaluation_with_stochastic_steps_alone(tmp_path: Path) -> None:
    for eta, keys in ((0.0, []), (0.5, ["eval_sampling.kernel"])):
        runs = [
            read_run(
                write_run(
                    tmp_path / f"{kernel}-{eta}",
                    config={"sampling": {"kernel": kernel}, "eval_eta": eta},
                )
            )
            for kernel in ("flow", "dance")
        ]
        assert evaluated_differently(runs) == keys


def test_the_command_composes_to_the_same_run(tmp_path: Path) -> None:
    settings = {
        "stack": {"lora": {"rank": 8}},
        "sampling": {"height": 16, "width": 32},
        "reward": {"scorers": {"color": {"path": "color"}}},
        "load_dir": "somewhere",
    }
    run = read_run(write_run(tmp_path / "with space", config=settings))
    program, verb, recipe, *overrides = shlex.split(command(run))
    assert (program, verb) == ("unirl", "train")
    config = compose(recipe, overrides)
    assert config.run_name == "with space-again"
    assert config.load_dir is None
    assert config.stack.lora is not None
    assert config.stack.lora.rank == 8
    assert config.num_rollouts == 12
