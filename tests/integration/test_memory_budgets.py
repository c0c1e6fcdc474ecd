"""Budgets hold, and are refused before anything loads; scorers' own components move as declared."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import GATE, REPLICA, assert_same_state, command, compare_with_plan, train

FREE = ("train_resident=null", "rollout_resident=null", "reward_resident=null")

SCORER = """
import torch
from unirl.core.components import FROZEN, Parking, TensorComponent
from unirl.memory.movers import module_components
from unirl.reward.scorer import Scorer


class Judging(Scorer):
    \"\"\"A network that parks, and a table that stays.\"\"\"

    def __init__(self):
        self.net = torch.nn.Linear(3, 1).requires_grad_(False)
        for parameter in self.net.parameters():
            torch.nn.init.constant_(parameter, 0.3)
        self.table = torch.linspace(0, 1, 1000)

    def components(self):
        kept = TensorComponent(
            "table", lambda: [self.table], lambda: FROZEN, parking=Parking.KEEP
        )
        return [*module_components("net", self.net), kept]

    def score(self, images, records):
        return self.net(images.float().mean(dim=(2, 3)) / 255).flatten() + self.table[-1]
"""


@pytest.mark.parametrize("residency", ["policy", "auto"])
def test_a_budget_that_is_too_small_is_refused_before_anything_loads(
    tmp_path: Path, residency: str
) -> None:
    words = (f"residency={residency}", "device_budget_gib=0.05", "~eval_rewards")
    run = command("train", tmp_path / "run", GATE, *words)
    assert run.exit_code == 3
    assert "train needs 73.7 MiB on the device, which has 51.2 MiB" in " ".join(run.errors.split())
    assert "stack.micro_batch_size" in run.errors
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_host_budget_is_taken_as_it_is_and_refused_with_who_holds_what(tmp_path: Path) -> None:
    enough = train(tmp_path / "enough", "host_budget_gib=0.0105", recipe=GATE)
    assert enough.exit_code == 0, enough.errors
    small = train(tmp_path / "small", "host_budget_gib=0.009", recipe=GATE)
    assert small.exit_code == 1
    told = " ".join(small.errors.split())
    assert "the key host_budget_gib is 0.009 GiB" in told
    assert "network.base" in told


@pytest.mark.parametrize(
    "where",
    [
        ("train_resident=true", "rollout_resident=true", "reward_resident=true"),
        ("residency=auto", "device_budget_gib=0.03", *FREE),
    ],
    ids=["all resident", "searched"],
)
def test_a_scorer_of_ones_own_moves_as_it_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[str, ...]
) -> None:
    (tmp_path / "my_rewards.py").write_text(SCORER)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("reward.scorers.mine.path=my_rewards:Judging", "num_rollouts=3", "save_interval=3")
    keys = ("train_resident=false", "rollout_resident=false", "reward_resident=false")
    parked = train(tmp_path / "parked", *words, *keys, recipe=REPLICA)
    assert parked.exit_code == 0, parked.errors
    moved = {line["component"] for line in parked.lines() if line["role"] == "reward"}
    assert {"reward.mine.net.weights", "reward.mine.net.buffers"} <= moved
    assert "reward.mine.table" not in moved
    other = train(tmp_path / "other", *words, *where, recipe=REPLICA)
    assert other.exit_code == 0, other.errors
    assert_same_state(parked, other, step=3)
    for run in (parked, other):
        code, told = compare_with_plan(run)
        assert code == 0, told


def test_a_run_that_ended_early_did_as_planned_until_then(tmp_path: Path) -> None:
    run = train(tmp_path / "run", recipe=GATE)
    file = run.directory / "transitions.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[: len(lines) // 2]))
    code, told = compare_with_plan(run)
    assert code == 2
    assert "all of them as planned: the run ended early" in told
