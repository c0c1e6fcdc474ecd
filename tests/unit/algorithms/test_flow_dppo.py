"""Flow-DPPO's mask and loss against a public implementation and where it says it masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import run_config
from golden_transition import INPUTS, REFERENCE, drawn_rows, fixed, reference_rows
from torch.distributions import Normal, kl_divergence

from unirl.algorithms.anchors import OldPolicyRows
from unirl.algorithms.flow_dppo import FlowDPPO, kept_loss
from unirl.algorithms.making import no_reward
from unirl.algorithms.transitions import transition_of

ROWS = OldPolicyRows(reference_rows(), INPUTS.v_old)


def dppo(threshold: float, **overrides: Any) -> FlowDPPO:
    keys = {"path": "flow_dppo", "kl_mask_threshold": threshold, **overrides}
    config = run_config({f"algorithm.{key}": value for key, value in keys.items()}).algorithm
    return FlowDPPO(config, no_reward)


@pytest.mark.parametrize("threshold", list(REFERENCE["dppo"]))
def test_loss_and_metrics_equal_the_public_implementation(threshold):
    made, published = dppo(float(threshold)), REFERENCE["dppo"][threshold]
    losses = made.loss(fixed(INPUTS.v), ROWS)
    assert float(losses.loss.mean()) == pytest.approx(published["loss"], rel=1e-6)
    metrics = made.metrics(losses.details)
    assert metrics["kl_old_mean"] == pytest.approx(published["kl_new_old_mean"], rel=1e-3)
    assert metrics["kl_old_max"] == pytest.approx(published["kl_new_old_max"], rel=1e-3)
    assert metrics["clip_fraction"] == published["masked_fraction"]
    assert metrics["clip_fraction_high"] == published["pos_rm_fraction"]
    assert metrics["clip_fraction_low"] == published["neg_rm_fraction"]


def test_the_divergence_is_the_kl_to_the_old_policy():
    rows, old_velocity = drawn_rows((3, 4))
    velocity = old_velocity * 1.2
    found = dppo(1.0).loss(fixed(velocity), OldPolicyRows(rows, old_velocity)).details["kl_old"]
    new, old = (
        Normal(one.mean, one.std.expand_as(one.mean))
        for one in (transition_of(rows, velocity), transition_of(rows, old_velocity))
    )
    torch.testing.assert_close(found, kl_divergence(new, old).flatten(1).mean(dim=1))


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("direction", [0.2, -0.2])
@pytest.mark.parametrize("too_far", [True, False])
def test_rows_are_left_out_exactly_where_they_are_too_far_and_would_move_on(
    advantage, direction, too_far
):
    rows, old_velocity = drawn_rows((3, 4))
    rows = replace(rows, advantages=torch.full((4,), advantage, dtype=torch.float64))
    old = transition_of(rows, old_velocity)
    # Along the noise that was drawn, so that the ratio goes the way of `direction`.
    change = (
        direction
        * (rows.next_latents - old.mean)
        / (transition_of(rows, old_velocity + 1).mean - old.mean)
    )
    velocity = (old_velocity + change).requires_grad_()
    anchored = OldPolicyRows(rows, old_velocity)
    details = dppo(1.0).loss(fixed(velocity), anchored).details
    assert (details["log_ratio"].sign() == (1 if direction > 0 else -1)).all()
    threshold = float(details["kl_old"].min() * 0.99 if too_far else details["kl_old"].max() * 1.01)
    losses = dppo(threshold).loss(fixed(velocity), anchored)
    (gradient,) = torch.autograd.grad(losses.loss.sum(), velocity)
    is_out = too_far and advantage * direction > 0
    assert bool(gradient.any()) == (not is_out and advantage != 0)
    expected = torch.zeros(4) if is_out else -advantage * details["log_ratio"].exp()
    torch.testing.assert_close(losses.details["policy_loss"], expected.double())


def test_each_row_is_judged_by_itself():
    rows, old_velocity = drawn_rows((3, 4))
    velocity = old_velocity.clone()
    velocity[2] += 0.5
    details = dppo(1e-9).loss(fixed(velocity), OldPolicyRows(rows, old_velocity)).details
    assert details["kl_old"][[0, 1, 3]].tolist() == [0, 0, 0]
    assert details["policy_loss"][[0, 1, 3]].tolist() == (-rows.advantages[[0, 1, 3]]).tolist()
    assert details["kl_old"][2] > 1e-9


def test_a_row_left_out_gives_no_nan_when_its_ratio_overflows():
    log_ratio = torch.tensor([1e4, 0.1], requires_grad=True)
    loss = kept_loss(log_ratio, torch.ones(2), torch.tensor([True, False]))
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    assert loss[0] == gradient[0] == 0
    assert float(gradient[1]) == pytest.approx(-float(torch.tensor(0.1).exp()))
