"""Divergences from the reference in their units, and the two references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import (
    randomize_adapter,
    rollout_request,
    run_config,
    sample,
    scored,
    tiny_model,
    train_stack,
)
from golden_transition import INPUTS, REFERENCE, TIME_STEP, fixed, reference_rows
from torch.distributions import Normal, kl_divergence

from unirl.algorithms.anchors import RatioRows
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.algorithms.making import no_reward
from unirl.algorithms.reference import EMA, divergence
from unirl.algorithms.transitions import transition_of
from unirl.core.types import ScoredRollout
from unirl.models.tiny import TinyModel

KL_FORMS = ("nats", "step_scaled", "mean_mse", "velocity_mse")


def mean_divergence(form: str) -> float:
    return float(divergence(form, reference_rows(), INPUTS.v, INPUTS.v_ref).mean())


@pytest.mark.parametrize(
    ("form", "published"),
    [
        ("step_scaled", "kl_loss_without_dt"),
        ("velocity_mse", "kl_velocity"),
        ("mean_mse", "kl_mean"),
    ],
)
def test_each_form_equals_the_public_implementation_that_has_it(form, published):
    assert mean_divergence(form) == pytest.approx(REFERENCE[published], rel=1e-4)


def test_nats_are_the_kl_of_the_two_gaussians():
    rows = reference_rows()
    ours, theirs = (transition_of(rows, velocity) for velocity in (INPUTS.v, INPUTS.v_ref))
    expected = kl_divergence(
        *(Normal(one.mean.double(), one.std.double().expand_as(one.mean)) for one in (ours, theirs))
    )
    found = divergence("nats", rows, INPUTS.v, INPUTS.v_ref)
    torch.testing.assert_close(found.double(), expected.flatten(1).mean(dim=1), rtol=1e-4, atol=0)


def test_the_forms_convert_into_each_other():
    rows = reference_rows()
    std = float(transition_of(rows, INPUTS.v).std[0])
    nats = mean_divergence("nats")
    assert mean_divergence("step_scaled") == pytest.approx(nats * TIME_STEP, rel=1e-5)
    assert mean_divergence("mean_mse") == pytest.approx(nats * 2 * std**2, rel=1e-4)


def test_the_loss_with_a_kl_equals_the_public_implementation():
    keys = {"clip_range": REFERENCE["case"]["clip_range"], "kl_form": "step_scaled"}
    keys |= {"kl_coefficient": REFERENCE["kl_coefficient"]}
    config = run_config({f"algorithm.{key}": value for key, value in keys.items()}).algorithm
    reference = replace(fixed(INPUTS.v), weights={"base": lambda: _Answers(asked, INPUTS.v_ref)})
    asked = reference.model
    rows = reference_rows()
    losses = FlowGRPO(config, no_reward).loss(reference, RatioRows(rows, rows.rollout_log_prob))
    added = float(losses.details["kl_reference"].mean()) * REFERENCE["kl_coefficient"]
    assert float(losses.loss.mean()) == pytest.approx(REFERENCE["loss_with_kl"], abs=3e-8)
    assert added == pytest.approx(REFERENCE["loss_with_kl"] - REFERENCE["policy_loss"], rel=0.05)


class _Answers:
    """A context in which a `FixedVelocity` gives another velocity."""

    def __init__(self, model, velocity) -> None:
        self._model, self._velocity = model, velocity

    def __enter__(self) -> None:
        self._kept, self._model._velocity = self._model._velocity, self._velocity

    def __exit__(self, *error: object) -> None:
        self._model._velocity = self._kept


# --- base and running average ---------------------------------------------------------------------

LEARNING = {
    "algorithm.kl_coefficient": 1e-6,
    "stack.optimizer.learning_rate": 1e-2,
    "stack.num_updates_per_batch": 2,
}


def kl_of_updates(model: TinyModel, reference: str, ema_decay: float = 0.5) -> list[float]:
    """kl_reference of the optimizer steps of three windows."""
    keys = {"algorithm.reference": reference, "algorithm.ema_decay": ema_decay}
    stack = train_stack(model, {**LEARNING, **keys})
    updates = [stack.update([roll_out(model, key)]) for key in "abc"]
    return [one.metrics["kl_reference"] for window in updates for one in window]


def roll_out(model: TinyModel, key: str) -> ScoredRollout:
    return scored(sample(model, rollout_request(key=key)))


def test_a_running_average_begins_where_the_run_does():
    """With a fresh adapter that is the base; with one that was trained before, it is not."""
    assert kl_of_updates(tiny_model(), "ema")[0] == kl_of_updates(tiny_model(), "base")[0] == 0
    trained = [tiny_model(), tiny_model()]
    for model in trained:
        randomize_adapter(model)
    assert kl_of_updates(trained[0], "ema")[0] == 0
    assert kl_of_updates(trained[1], "base")[0] > 1e-4


def test_a_running_average_follows_the_weights_once_per_window():
    base, ema = kl_of_updates(tiny_model(), "base"), kl_of_updates(tiny_model(), "ema", 0.5)
    # Within the first window both are the weights of its start.
    assert ema[1] == pytest.approx(base[1], rel=1e-3)
    assert 0 < ema[2] < base[2]
    assert 0 < ema[4] < base[4]


def test_an_average_that_keeps_nothing_is_the_policy_at_the_windows_start():
    found = kl_of_updates(tiny_model(), "ema", 0.0)
    assert found[0::2] == [0, 0, 0]
    assert min(found[1::2]) > 0


def test_a_running_average_is_kept_only_where_it_is_asked():
    def shadows(**keys: object) -> list[str]:
        config = run_config({f"algorithm.{key}": value for key, value in keys.items()}).algorithm
        return list(FlowGRPO(config, no_reward).shadows())

    assert shadows(reference="ema", kl_coefficient=0.1) == [EMA]
    assert shadows(reference="ema") == []
    assert shadows(kl_coefficient=0.1) == []
