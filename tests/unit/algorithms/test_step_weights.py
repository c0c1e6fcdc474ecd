"""The weights that FlashGRPO and TempFlow-GRPO give to steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import policy, randomize_adapter, rollout_request, run_config, sample, scored
from builders import tiny_model as make_tiny_model
from golden_transition import drawn_rows, fixed

from unirl.algorithms.anchors import RatioRows
from unirl.algorithms.flash_grpo import FlashGRPO, insensitivity
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.algorithms.making import make_algorithm, no_reward
from unirl.algorithms.tempflow_grpo import TempFlowGRPO
from unirl.algorithms.transitions import transition_of, unit_step
from unirl.config.schema import AlgorithmConfig
from unirl.core.types import ScoredRollout

KERNELS = ("flow", "dance", "flash", "cps", "ddim")


def config(name: str, **overrides: Any) -> AlgorithmConfig:
    keys = {"path": name, **overrides}
    return run_config({f"algorithm.{key}": value for key, value in keys.items()}).algorithm


def roll_out(kernel: str = "flow", steps: tuple[int, ...] = (0, 1, 2, 3) * 2) -> ScoredRollout:
    """One stochastic step per sample."""
    model = make_tiny_model()
    randomize_adapter(model)
    request = replace(rollout_request(kernel=kernel), sde_steps=tuple((step,) for step in steps))
    return scored(sample(model, request))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_unit_step_has_the_std_and_the_velocity_derivative_of_every_row(kernel):
    rows, velocity = drawn_rows((3, 4), kernel)
    velocity.requires_grad_()
    step = unit_step(rows)
    gaussian = transition_of(rows, velocity)
    torch.testing.assert_close(step.std.flatten(), gaussian.std.flatten())
    (derivative,) = torch.autograd.grad(gaussian.mean.sum(), velocity)
    torch.testing.assert_close(step.mean.view(-1, 1, 1).expand_as(derivative), derivative)


# --- FlashGRPO ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["flow", "dance", "flash"])
def test_flash_weights_are_the_published_ones_for_reverse_sdes(kernel):
    rows, _ = drawn_rows((3, 4), kernel)
    dt, s = rows.sigma_next - rows.sigma, rows.sigma
    diffusion = unit_step(rows).std.flatten() / (-dt).sqrt()
    weight = 1 / ((-dt).sqrt() / diffusion + diffusion * (-dt).sqrt() * (1 - s) / (2 * s))
    expected = weight / weight[:3].mean()  # the fourth row has the second one's step
    torch.testing.assert_close(insensitivity(rows), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_flash_makes_gradients_equally_large_at_every_step(kernel):
    """Of rows with noise and advantage of equal size, w.r.t. the velocity."""
    rows, velocity = drawn_rows((3, 4), kernel)
    gaussian = transition_of(rows, velocity)
    rows = replace(
        rows,
        next_latents=gaussian.sample(torch.ones_like(velocity)),
        advantages=torch.ones(4, dtype=torch.float64),
    )
    rows = replace(rows, rollout_log_prob=gaussian.log_prob(rows.next_latents))
    velocity.requires_grad_()

    def norms(advantages: torch.Tensor) -> torch.Tensor:
        anchored = RatioRows(replace(rows, advantages=advantages), rows.rollout_log_prob)
        loss = FlowGRPO(config("flow_grpo"), no_reward).loss(fixed(velocity), anchored).loss
        (gradient,) = torch.autograd.grad(loss.sum(), velocity)
        return gradient.flatten(1).norm(dim=1)

    weighed = norms(insensitivity(rows))
    torch.testing.assert_close(weighed, weighed[:1].expand(4))
    assert norms(rows.advantages).max() > 1.1 * norms(rows.advantages).min()


def test_flash_weights_have_mean_one_over_the_steps_of_the_rollout():
    uneven = roll_out(steps=(0, 0, 0, 1, 0, 0, 0, 1))
    weight = insensitivity(FlowGRPO(config("flow_grpo"), no_reward).rows([uneven]))
    assert float(weight[0] + weight[3]) / 2 == pytest.approx(1)
    assert float(weight[0]) > float(weight[3])


def test_flash_weights_do_not_depend_on_the_rollouts_beside():
    one = roll_out()
    grpo = FlowGRPO(config("flow_grpo"), no_reward)
    apart, together = (insensitivity(grpo.rows(scored)) for scored in ([one], [one, one]))
    torch.testing.assert_close(together, apart.repeat(2))


@pytest.mark.parametrize("name", ["flash_grpo", "tempflow_grpo"])
def test_the_loss_is_flow_grpos_times_the_weight_of_the_step(name):
    model = make_tiny_model()
    randomize_adapter(model)
    one = roll_out()
    plain, weighed = (make_algorithm(config(path)) for path in ("flow_grpo", name))
    losses = []
    for made in (plain, weighed):
        rows, _ = made.anchor(policy(model), made.rows([one]), [torch.arange(8)])
        losses.append(made.loss(policy(model), rows).loss)
    weight = weighed.rows([one]).advantages / plain.rows([one]).advantages
    torch.testing.assert_close(losses[1], losses[0] * weight)
    assert len(set(weight.tolist())) > 1


def test_flash_rows_have_weighed_advantages():
    one = roll_out("flash")
    plain = FlowGRPO(config("flow_grpo"), no_reward).rows([one])
    weighed = FlashGRPO(config("flash_grpo"), no_reward).rows([one])
    torch.testing.assert_close(weighed.advantages, plain.advantages * insensitivity(plain))


# --- TempFlow-GRPO --------------------------------------------------------------------------------


def test_tempflow_weighs_a_step_by_the_whole_std_of_its_noise():
    one = roll_out("dance")
    plain = FlowGRPO(config("flow_grpo"), no_reward).rows([one])
    rows = TempFlowGRPO(config("tempflow_grpo", weight_scale=3.0), no_reward).rows([one])
    std = 0.7 * math.sqrt(0.2)  # eta sqrt(-dt), the same at every step of this schedule
    torch.testing.assert_close(rows.advantages, plain.advantages * 3.0 * std)


def test_tempflow_gives_early_steps_of_the_flow_kernel_more_weight():
    rows = TempFlowGRPO(config("tempflow_grpo"), no_reward).rows([roll_out()])
    plain = FlowGRPO(config("flow_grpo"), no_reward).rows([roll_out()])
    weight = (rows.advantages / plain.advantages)[:4]
    assert weight.tolist() == sorted(weight.tolist(), reverse=True)
    assert float(weight[0]) > float(weight[3])
