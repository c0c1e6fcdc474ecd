"""GRPO-Guard's ratio and loss against public implementations and by their definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import run_config
from golden_transition import INPUTS, REFERENCE, TIME_STEP, drawn_rows, fixed, reference_rows
from torch import Tensor

from unirl.algorithms.anchors import OldPolicyRows
from unirl.algorithms.base import RowLosses
from unirl.algorithms.grpo_guard import GRPOGuard, normalised_log_ratio
from unirl.algorithms.making import no_reward
from unirl.algorithms.transitions import transition_of

PUBLISHED = REFERENCE["guard"]


def guard(**overrides: Any) -> GRPOGuard:
    keys = {"path": "grpo_guard", "clip_range": REFERENCE["case"]["clip_range"], **overrides}
    config = run_config({f"algorithm.{key}": value for key, value in keys.items()}).algorithm
    return GRPOGuard(config, no_reward)


def reference_losses(**overrides: Any) -> RowLosses:
    rows = OldPolicyRows(reference_rows(), INPUTS.v_old)
    return guard(**overrides).loss(fixed(INPUTS.v), rows)


def test_ratio_and_loss_equal_the_public_implementations():
    losses = reference_losses()
    ratio = losses.details["log_ratio"].exp()
    # flow_grpo adds and subtracts what nearly cancels, which costs it two digits.
    for published, rtol in (("ratio_flow_factory", 1e-7), ("ratio", 2e-6)):
        torch.testing.assert_close(ratio, torch.tensor(PUBLISHED[published]), rtol=rtol, atol=0)
    for published in ("policy_loss", "loss_verl_omni"):
        assert float(losses.loss.mean()) == pytest.approx(PUBLISHED[published], rel=5e-6)


def test_without_the_division_by_time_the_loss_is_flow_factorys():
    losses = reference_losses(loss_per_time=False)
    expected = PUBLISHED["policy_loss_without_time"]
    assert float(losses.loss.mean()) == pytest.approx(expected, rel=5e-6)
    torch.testing.assert_close(losses.loss / TIME_STEP, reference_losses().loss)


def test_the_division_by_time_leaves_the_kl_alone():
    rows = OldPolicyRows(reference_rows(), INPUTS.v_old)
    policy = fixed(INPUTS.v)
    policy = replace(policy, weights={"base": torch.no_grad})
    found = guard(kl_coefficient=2.0).loss(policy, rows).details
    torch.testing.assert_close(found["loss"], found["policy_loss"] + 2 * found["kl_reference"])


def test_the_ratio_is_that_of_the_papers_formula():
    rows, old_velocity = drawn_rows((3, 4))
    old, new = (transition_of(rows, velocity) for velocity in (old_velocity, old_velocity * 1.2))
    value = rows.next_latents
    divergence = ((new.mean - old.mean) ** 2 / (2 * old.std**2)).flatten(1).mean(dim=1)
    plain = new.log_prob(value) - old.log_prob(value)
    expected = (plain + divergence) * old.std.flatten()
    torch.testing.assert_close(normalised_log_ratio(new, old, value), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_equal_means_the_ratio_is_exactly_one_whatever_was_drawn(dtype):
    rows, velocity = drawn_rows((3, 4), dtype=dtype)
    one = transition_of(rows, velocity)
    for value in (rows.next_latents, 3 * rows.next_latents):
        assert normalised_log_ratio(one, one, value).tolist() == [0.0] * 4


def test_over_draws_the_log_ratio_has_mean_zero_and_the_same_width_at_every_step():
    """A plain log-ratio has a mean below 0, and a width that depends on the step."""
    rows, old_velocity = drawn_rows((50_000,))
    old = transition_of(rows, old_velocity)
    shift = 0.1 * torch.ones_like(old.mean)
    new = type(old)(old.mean + shift, old.std)

    def width(log_ratio_of_elements: Tensor) -> Tensor:
        return log_ratio_of_elements.std(dim=1)

    noise = (rows.next_latents - old.mean) / old.std
    torch.testing.assert_close(
        width(shift * noise), torch.full((4,), 0.1).double(), rtol=0.02, atol=0
    )
    assert normalised_log_ratio(new, old, rows.next_latents).abs().max() < 2e-3
    plain = new.log_prob(rows.next_latents) - old.log_prob(rows.next_latents)
    assert plain.max() < -0.005


def test_each_sample_is_normalised_by_its_own_step():
    """A mean of sigmas over the batch, or a broadcast, would let other rows change a row."""
    rows, old_velocity = drawn_rows((3, 4))
    anchored = OldPolicyRows(rows, old_velocity)
    velocity = old_velocity * 1.1
    together = guard().loss(fixed(velocity), anchored)
    for row in range(4):
        index = torch.tensor([row])
        apart = guard().loss(fixed(velocity[index]), anchored.select(index))
        torch.testing.assert_close(apart.loss, together.loss[index])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("scale", [-3.0, -0.5, 0.5, 3.0])
def test_the_clip_removes_the_gradient_only_where_the_step_was_already_made(advantage, scale):
    """The mean is moved along the noise, by `scale` clip ranges of the ratio's logarithm."""
    rows, old_velocity = drawn_rows((3, 4))
    rows = replace(rows, advantages=torch.full((4,), advantage, dtype=torch.float64))
    old = transition_of(rows, old_velocity)
    noise = (rows.next_latents - old.mean) / old.std
    derivative = transition_of(rows, old_velocity + 1).mean - old.mean
    change = scale * 0.01 * noise / (noise**2).flatten(1).mean(dim=1).view(-1, 1, 1) / derivative
    velocity = (old_velocity + change).requires_grad_()
    losses = guard(clip_range=0.01).loss(fixed(velocity), OldPolicyRows(rows, old_velocity))
    expected = torch.full((4,), scale * 0.01, dtype=torch.float64)
    torch.testing.assert_close(losses.details["log_ratio"], expected)
    (gradient,) = torch.autograd.grad(losses.loss.sum(), velocity)
    assert bool(gradient.any()) != (abs(scale) > 1 and scale * advantage > 0)
