"""A plan says line by line what a run then writes down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import GATE, REPLICA, command, compare_with_plan, read_json_lines, train

FAST = ("sampling.num_inference_steps=4", "model.precision=fp32", "~eval_rewards")
ALL_PARKED = ("train_resident=false", "rollout_resident=false", "reward_resident=false")
FREE = ("train_resident=null", "rollout_resident=null", "reward_resident=null")
SUITE = "{data:'pkg:numbers/heldout.jsonl',num_prompts:3,scorers:{other:{path:ocr}}}"
BUSY = ("num_rollouts=4", "eval_interval=2", "save_interval=2", "eval_chunk_prompts=2")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("eval_interval=2", "save_interval=2", f"+eval_suites.few={SUITE}"),
        ("accumulate_rollouts=2", "eval_interval=2", "save_interval=2", "num_rollouts=4"),
        ("save_reads=host", "save_interval=1"),
        ("rollout.share_base=true",),
    ],
    ids=["gate", "evaluate and save", "windows", "saves from the host", "shared base"],
)
def test_the_gate_does_what_its_plan_says(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = command("train", tmp_path / "gate", GATE, *FAST, "eval_num_prompts=20", *overrides)
    assert run.exit_code == 0, run.errors
    code, text = compare_with_plan(run)
    assert code == 0, text
    assert "the same moves, in the same order, of the same bytes" in text


@pytest.mark.parametrize(
    "overrides",
    [
        ("train_resident=false",),
        ("stack.lora=null", "reward_resident=false"),
        ("residency=auto", "device_budget_gib=0.03", *FREE),
        ("residency=auto", "device_budget_gib=0.03", "train_resident=false"),
        ("weight_sync_interval=2", *ALL_PARKED),
        ("overlap_moves=true", "device_budget_gib=1", *ALL_PARKED),
        ("overlap_moves=true", "device_budget_gib=0.03", "residency=auto", *FREE),
    ],
    ids=[
        "train parked",
        "full weights",
        "auto",
        "auto with a key set",
        "rare syncs",
        "overlap",
        "overlap with auto",
    ],
)
def test_a_busy_run_does_what_its_plan_says(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = train(tmp_path / "run", *BUSY, *overrides, recipe=REPLICA)
    assert run.exit_code == 0, run.errors
    code, text = compare_with_plan(run)
    assert code == 0, text


def test_moves_overlap_in_a_run_where_the_plan_says_so(tmp_path: Path) -> None:
    words = (*ALL_PARKED, "overlap_moves=true", "device_budget_gib=1", *BUSY)
    lines = train(tmp_path / "run", *words, recipe=REPLICA).lines()
    overlapped = [line for line in lines if line["rule"] == "overlap"]
    assert {(line["role"], line["move"]) for line in overlapped} >= {
        ("train", "offload"),
        ("rollout", "onload"),
    }
    assert len(overlapped) < len(lines), "only where both ways have something to copy"


def test_a_run_that_did_something_else_is_told_where(tmp_path: Path) -> None:
    run = command("train", tmp_path / "gate", GATE, *FAST)
    file = run.directory / "transitions.jsonl"
    lines = read_json_lines(file)
    lines[3]["moved_bytes"] += 1
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    code, text = compare_with_plan(run)
    assert code == 2
    assert "move 4, train offload (train.buffers): planned -> run: moved_bytes" in text
    assert f"move {len(lines)}, not made: train onload (train.buffers)" in text


def test_a_run_leaves_a_trace_with_its_phases_and_moves(tmp_path: Path) -> None:
    run = command("train", tmp_path / "gate", GATE, *FAST)
    text = (run.directory / "trace.json").read_text()
    events = json.loads(text.rstrip().rstrip(",") + "]")
    slices = [event for event in events if event["ph"] == "X"]
    moves = [event for event in slices if event["tid"] in (2, 3)]
    lines = read_json_lines(run.directory / "transitions.jsonl")
    assert [event["args"]["moved_bytes"] for event in moves] == [
        line["moved_bytes"] for line in lines
    ]
    phases = {event["name"] for event in slices if event["tid"] == 1}
    assert phases == {"doctor", "rollout", "reward", "train", "sync", "total"}
    assert all(event["dur"] >= 0 and event["ts"] > 0 for event in slices)
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert counters[-1] == {"device": lines[-1]["device_bytes"], "host": lines[-1]["host_bytes"]}
