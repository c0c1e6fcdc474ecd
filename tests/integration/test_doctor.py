"""`unirl doctor` and the look that every run begins with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import REPLICA, SMALL, Run, assert_same_state, command, train

QUIET = ("save_interval=2", "num_rollouts=2")
TOO_LARGE = "stack.optimizer.adam_epsilon=1.0"


def doctor(directory: Path, *overrides: str, recipe: str = "quickstart") -> Run:
    return command("doctor", directory, recipe, *SMALL, *overrides)


def findings(run: Run) -> dict[str, dict[str, Any]]:
    """Of a run's doctor.json, by name."""
    told = json.loads((run.directory / "doctor.json").read_text())
    return {finding["name"]: finding for finding in told["findings"]}


# --- the command --------------------------------------------------------------------------------


def test_a_recipe_that_is_fine_leaves_no_files(tmp_path: Path) -> None:
    run = doctor(tmp_path / "run")
    assert run.exit_code == 0, run.output + run.errors
    assert "exactly 1" in run.output
    assert run.output.splitlines()[-1] == "quickstart: all is fine"
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_fine_is_exit_code_1_with_the_key_to_set(tmp_path: Path) -> None:
    run = doctor(tmp_path / "run", TOO_LARGE)
    assert run.exit_code == 1
    assert run.output.splitlines()[-1] == "quickstart: not fine: gradient"
    assert "stack.optimizer.adam_epsilon=" in run.output


def test_a_wrong_recipe_is_exit_code_3(tmp_path: Path) -> None:
    run = doctor(tmp_path / "run", "sampling.eta=0")
    assert (run.exit_code, run.output) == (3, "")
    assert "eta" in run.errors


def test_a_recipe_for_several_devices_is_refused_with_what_to_set(tmp_path: Path) -> None:
    run = doctor(tmp_path / "run", "num_devices=2")
    assert run.exit_code == 3
    assert "Set num_devices=1" in run.errors


def test_programs_get_the_same_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = doctor(tmp_path / "run", TOO_LARGE, "--json")
    told = json.loads(run.output)
    bad = [finding["name"] for finding in told["findings"] if not finding["is_fine"]]
    assert (run.exit_code, told["is_fine"], bad) == (1, False, ["gradient"])
    assert [level["step"] for level in told["levels"]] == [0, 1]


def test_a_resumed_run_is_examined_where_it_goes_on(tmp_path: Path) -> None:
    """With an engine of its own, which must have got the saved adapter first."""
    small = ("save_interval=1", "num_rollouts=1")
    assert train(tmp_path / "first", *small, recipe=REPLICA).exit_code == 0
    load = f"load_dir={tmp_path / 'first'}"
    run = doctor(tmp_path / "second", load, "num_rollouts=4", "--json", recipe=REPLICA)
    assert run.exit_code == 0, run.output + run.errors
    document = run.output[run.output.index("{") :]  # the first run's log handlers still print
    told = {finding["name"]: finding for finding in json.loads(document)["findings"]}
    assert "Everything that is trained" in told["tensors without gradient"]["sentence"]
    assert told["rollout against replay"]["is_fine"]
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


# --- in every run -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("looked") / "run", *QUIET)


def test_a_run_says_one_line_and_writes_the_rest_down(looked_at: Run) -> None:
    assert looked_at.exit_code == 0, looked_at.errors
    found = findings(looked_at)
    assert found["ratio"]["value"] == "exactly 1"
    (line,) = [line for line in looked_at.output.splitlines() if "doctor" in line]
    path = looked_at.directory / "doctor.json"
    assert line == f"doctor: {len(found)} of {len(found)} fine, see {path}"
    for finding in found.values():
        assert f"doctor: {finding['name']}: {finding['value']}. {finding['sentence']}" in (
            looked_at.log
        )


def test_what_is_not_fine_is_a_warning(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "num_rollouts=1", TOO_LARGE)
    assert run.exit_code == 0
    (warning,) = [line for line in run.output.splitlines() if line.startswith("warning: doctor")]
    assert "stack.optimizer.adam_epsilon=" in warning
    assert not findings(run)["gradient"]["is_fine"]


def test_a_run_is_the_same_bit_for_bit_without_a_look(looked_at: Run, tmp_path: Path) -> None:
    alone = train(tmp_path / "run", *QUIET, "doctor=false")
    assert not (alone.directory / "doctor.json").exists()
    assert "doctor" not in alone.output
    assert alone.numbers() == looked_at.numbers()
    assert_same_state(alone, looked_at, 2)
