"""`unirl plan` on the command line: exit codes, options, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unirl.cli.main import main

GATE = ["plan", "diffusion/tiny/tiny_residency_gate", "~eval_rewards"]
SD3 = ["plan", "diffusion/sd3/sd3_replica_lora", "rollout.forward_batch_size=1"]


def test_a_plan_that_fits_exits_0_and_one_that_does_not_exits_2(capsys) -> None:
    assert main([*GATE, "--gpu", "h100-80g"]) == 0
    told = capsys.readouterr().out
    assert "for h100-80g (79.6 GiB, 8.0 GiB of them kept free)" in told
    assert told.endswith("Fits: the fullest phase is train with 73.7 MiB.\n")
    assert main([*GATE, "--budget-gib", "0.05"]) == 2
    told = capsys.readouterr().out
    assert "Does not fit: train needs 73.7 MiB, the budget is 51.2 MiB." in told
    assert told.endswith("It fits with: backend.activation_checkpointing=true\n")


def test_without_a_budget_the_fullest_phase_is_named(capsys) -> None:
    assert main(GATE) == 0
    assert capsys.readouterr().out.endswith(
        "No budget given; the fullest phase is train with 73.7 MiB.\n"
    )


def test_a_recipe_is_planned_without_its_weights_and_prompts(capsys) -> None:
    """What `unirl check` must refuse on this machine."""
    words = [*SD3, "model.path=/sd35m", "data.train=/not/here.txt", "device=cuda:3"]
    assert main([*words, "--gpu", "rtx4090", "backend.activation_checkpointing=true"]) == 0
    told = capsys.readouterr().out
    assert "sizes from published configs of sd3.5-medium, since model.path=/sd35m is not" in told
    assert "Not counted: prompts of /not/here.txt" in told
    assert main(["check", *SD3[1:]]) == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model.release=sd3.5medium"], "Did you mean sd3.5-medium?"),
        (["model.release=null"], "model.release is null"),
        (["stack.micro_batch_size=0"], "stack.micro_batch_size"),
        (["sampling.height=500"], "sampling.height"),
        (["--gpu", "h900"], "--gpu h900 is not known"),
        (["--budget-gib", "0"], "--budget-gib 0: it must be a number above 0"),
        (["--host-gib", "-1"], "--host-gib -1: it must be"),
        (["--link-gb", "nan"], "--link-gb nan: it must be"),
        (["--rollouts", "0"], "--rollouts 0: it must be at least 1"),
        (["--what-if", "train_residnt=true"], "train_residnt"),
        (["rollout.share_base=true", "stack.lora=null"], "rollout.share_base"),
    ],
)
def test_what_cannot_be_planned_exits_3(capsys, words: list[str], told: str) -> None:
    assert main([*SD3, *words]) == 3
    assert told in " ".join(capsys.readouterr().err.split())


def test_json_is_the_whole_plan(capsys) -> None:
    assert main([*GATE, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["window"]["transitions"][0] == "train offload"
    assert [move["seq"] for move in told["moves"]] == list(range(1, len(told["moves"]) + 1))
    assert told["fits"] is True


def test_the_horizon_can_be_set(capsys) -> None:
    counts = []
    for number in ("1", "9"):
        main([*GATE, "num_rollouts=50", "--rollouts", number, "--json"])
        told = json.loads(capsys.readouterr().out)
        assert told["num_rollouts"] == max(int(number), 3), "the first window is like no other"
        counts.append(len(told["moves"]))
    assert counts[1] > 2 * counts[0]


def test_what_if_compares_two_plans(capsys) -> None:
    assert main([*GATE, "--what-if", "train_resident=true", "--what-if", "seed=3"]) == 0
    told = capsys.readouterr().out
    last = told.split("\nWith train_resident=true seed=3\n")[1]
    assert main([*GATE, "--json", "--what-if", "train_resident=true"]) == 0
    other = json.loads(capsys.readouterr().out)["what_if"]
    assert other["changes"] == ["train_resident=true"]
    assert "train offload" not in other["window"]["transitions"]
    assert "moved per window" in last
    assert "Fits" in last or "No budget" in last


def test_a_trace_has_every_phase_and_move_on_a_clock_of_its_own(capsys, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    assert main([*GATE, "--trace", str(file), "--budget-gib", "1", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    events = json.loads(file.read_text())
    slices = [event for event in events if event["ph"] == "X"]
    assert [e["name"] for e in slices if e["tid"] == 1] == ["rollout", "reward", "train"] * 2
    moved = [e["args"]["moved_bytes"] for e in slices if e["tid"] != 1]
    assert moved == [move["moved_bytes"] for move in plan["moves"]]
    starts = [event["ts"] for event in slices]
    assert starts == sorted(starts)
    ends = [event["ts"] + event["dur"] for event in slices]
    assert all(end <= start + 1e-3 for end, start in zip(ends, starts[1:], strict=False))
    counted = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "phase"]
    assert {values["budget"] for values in counted} == {2**30}
    fullest = max(phase["total_bytes"] for phase in plan["phases"])
    assert max(values["in all"] for values in counted) == fullest


def test_a_trace_that_cannot_be_written_is_an_error(capsys) -> None:
    assert main([*GATE, "--trace", "/no/such/folder/trace.json"]) == 3
    assert "--trace /no/such/folder/trace.json: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "there is no"),
        ({"config.yaml": "seed: 1"}, "transitions.jsonl"),
        ({"config.yaml": "seed: [", "transitions.jsonl": ""}, "cannot be read"),
        ({"config.yaml": "sampling: {eta: -1}", "transitions.jsonl": ""}, "sampling.eta"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(
    capsys, tmp_path: Path, files: dict[str, str], told: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert main(["plan", "--compare", str(tmp_path)]) == 3
    assert told in capsys.readouterr().err


def test_compare_takes_the_runs_own_settings_and_whole_runs_only(capsys, tmp_path: Path) -> None:
    assert main(["plan", "--compare", str(tmp_path), "--json"]) == 3
    assert "--compare plans the run's own config.yaml" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("load_dir: runs/before")
    (tmp_path / "transitions.jsonl").write_text("")
    assert main(["plan", "--compare", str(tmp_path)]) == 3
    assert "a resumed run; only unbroken ones are compared" in capsys.readouterr().err


def test_auto_that_fits_nowhere_is_a_plan_with_the_change_that_helps(capsys) -> None:
    free = ["train_resident=null", "rollout_resident=null", "reward_resident=null"]
    assert main([*GATE, "residency=auto", *free, "--budget-gib", "0.05"]) == 2
    told = capsys.readouterr().out
    assert "Does not fit: train needs 73.7 MiB" in told
    assert told.endswith("It fits with: backend.activation_checkpointing=true\n")


def test_the_recipes_budget_holds_beside_a_larger_gpu(capsys) -> None:
    assert main([*GATE, "--gpu", "h200", "device_budget_gib=0.05"]) == 2
    assert "h200, of which device_budget_gib leaves 0.05 GiB" in capsys.readouterr().out
