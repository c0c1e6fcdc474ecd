"""`start_from`: a run begins with another run's weights, and with nothing else of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import REPLICA, Run, train

EVALUATED = ("eval_interval=2", "save_interval=2", "num_rollouts=2", "doctor=false")
STRONG = "stack.optimizer.learning_rate=2e-3"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("adapter") / "run", *EVALUATED, STRONG)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = ("stack.lora=null", "stack.optimizer.learning_rate=1e-3")
    return train(tmp_path_factory.mktemp("everything") / "run", *EVALUATED, *settings)


def evaluations(run: Run) -> list[float]:
    assert run.exit_code == 0, run.errors
    return [row["eval/reward_mean"] for row in run.rows("eval")]


@pytest.mark.parametrize("recipe", ["quickstart", REPLICA, "diffusion/tiny/tiny_diffusion_nft"])
def test_an_adapter_is_taken_over_by_a_run_of_any_algorithm_and_engine(
    adapter: Run, tmp_path: Path, recipe: str
) -> None:
    run = train(tmp_path / "run", *EVALUATED, f"start_from={adapter.directory}", recipe=recipe)
    first, last = evaluations(adapter)
    assert first != last
    assert evaluations(run)[0] == pytest.approx(last, abs=1e-6)
    assert run.optimizer(2)["num_steps"] == 2, "the optimizer begins anew"


def test_a_run_without_evaluations_samples_with_the_weights_it_begins_with(
    adapter: Run, tmp_path: Path
) -> None:
    """An engine of its own has to be told before the first rollout."""
    one = ("num_rollouts=1", "doctor=false")
    begun = f"start_from={adapter.directory}"
    rewards = [
        train(tmp_path / name, *one, *settings, recipe=recipe).rows()[0]["rollout/reward_mean"]
        for name, recipe, settings in (
            ("base", REPLICA, ()),
            ("begun", REPLICA, (begun,)),
            ("shared", "quickstart", (begun,)),
        )
    ]
    assert rewards[1] == pytest.approx(rewards[2], abs=1e-6)
    assert rewards[0] != rewards[1]


def test_an_adapter_is_merged_where_all_weights_are_trained(adapter: Run, tmp_path: Path) -> None:
    settings = ("stack.lora=null", "stack.optimizer.learning_rate=1e-4")
    run = train(tmp_path / "run", *EVALUATED, *settings, f"start_from={adapter.directory}")
    assert evaluations(run)[0] == pytest.approx(evaluations(adapter)[1], abs=0.02)
    plain = train(tmp_path / "plain", *EVALUATED, *settings)
    begun, base = run.weights(2), plain.weights(2)
    assert begun.keys() == base.keys()
    assert any((begun[name] - base[name]).abs().max() > 1e-3 for name in base)


def test_all_weights_are_taken_over(everything: Run, tmp_path: Path) -> None:
    settings = ("stack.lora=null", f"start_from={everything.directory}")
    run = train(tmp_path / "run", *EVALUATED, *settings, "stack.optimizer.learning_rate=1e-30")
    assert evaluations(run)[0] == evaluations(everything)[1]
    for name, tensor in everything.weights(2).items():
        assert torch.equal(tensor, run.weights(2)[name])


def test_what_cannot_be_taken_over_is_refused(
    adapter: Run, everything: Run, tmp_path: Path
) -> None:
    refused = [
        ((f"start_from={everything.directory}",), "unirl export"),
        ((f"start_from={adapter.directory}", "stack.lora.rank=4"), "rank 16 -> 4"),
        ((f"start_from={adapter.directory}", "stack.lora.alpha=1"), "alpha 128.0 -> 1.0"),
        ((f"start_from={tmp_path}/nowhere",), "start_from"),
    ]
    for settings, reason in refused:
        run = train(tmp_path / "run", *EVALUATED, *settings)
        assert run.exit_code == 3, run.output
        assert reason in run.errors
        assert not run.rows()
