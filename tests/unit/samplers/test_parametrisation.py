"""Noise- and v-prediction models as velocity models."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor

from unirl.samplers.kernels import euler, make_kernel
from unirl.samplers.noise import keyed_noise
from unirl.samplers.parametrisation import (
    flow_level,
    from_flow,
    start_scale,
    to_flow,
    velocity_from_epsilon,
    velocity_from_v,
)

CLEAN, NOISE = (keyed_noise([f"{k}/0", f"{k}/1"], (4, 3, 6)).double() for k in ("clean", "noise"))
ALPHA_CUMPRODS = torch.tensor([0.9, 0.05], dtype=torch.float64)
LEVELS = torch.tensor([flow_level(a) for a in ALPHA_CUMPRODS.tolist()], dtype=torch.float64)


def in_model_coordinates() -> tuple[Tensor, Tensor, Tensor]:
    """x = alpha x0 + sigma e, with alpha and sigma [B, 1, 1, 1]."""
    alpha = ALPHA_CUMPRODS.sqrt().view(-1, 1, 1, 1)
    sigma = (1 - ALPHA_CUMPRODS).sqrt().view(-1, 1, 1, 1)
    return alpha * CLEAN + sigma * NOISE, alpha, sigma


def test_model_latents_become_a_flow_between_clean_and_noise() -> None:
    x, _, _ = in_model_coordinates()
    s = LEVELS.view(-1, 1, 1, 1)
    torch.testing.assert_close(to_flow(x, LEVELS), (1 - s) * CLEAN + s * NOISE)
    torch.testing.assert_close(from_flow(to_flow(x, LEVELS), LEVELS), x)


def test_both_predictions_give_noise_minus_clean() -> None:
    x, alpha, sigma = in_model_coordinates()
    torch.testing.assert_close(velocity_from_epsilon(x, NOISE, LEVELS), NOISE - CLEAN)
    v_prediction = alpha * NOISE - sigma * CLEAN
    torch.testing.assert_close(velocity_from_v(x, v_prediction, LEVELS), NOISE - CLEAN)


def test_a_v_prediction_gives_a_velocity_where_no_signal_is_left() -> None:
    """At level 1 v is -x0 and x is e."""
    velocity = velocity_from_v(NOISE, -CLEAN, torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(velocity, NOISE - CLEAN)


@pytest.mark.parametrize(("alpha_cumprod", "level"), [(1.0, 0.0), (0.5, 0.5), (0.0, 1.0)])
def test_levels_run_from_no_noise_to_no_signal(alpha_cumprod: float, level: float) -> None:
    assert flow_level(alpha_cumprod) == pytest.approx(level, abs=1e-15)


@pytest.mark.parametrize("alpha_cumprod", [0.0, 0.005, 0.3, 1.0])
def test_unit_noise_is_scaled_as_the_models_own_latents_are(alpha_cumprod: float) -> None:
    level = flow_level(alpha_cumprod)
    expected = to_flow(NOISE, torch.full((2,), level, dtype=torch.float64))
    torch.testing.assert_close(start_scale(level) * NOISE, expected)
    alpha_plus_sigma = math.sqrt(alpha_cumprod) + math.sqrt(1 - alpha_cumprod)
    assert start_scale(level) == pytest.approx(1 / alpha_plus_sigma)
    assert start_scale(1.0) == 1


def toy_epsilon(x: Tensor, alpha_cumprod: float) -> Tensor:
    """A noise prediction that depends on latents and level, and on neighbours within a row."""
    return torch.tanh(x + x.roll(1, dims=-1)) * math.sqrt(1 - alpha_cumprod) + 0.1 * x


@pytest.mark.parametrize("stepper", ["ddim", "euler"])
def test_a_whole_ddim_loop_equals_the_flow_loop(stepper: str) -> None:
    scheduler = DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False)
    scheduler.set_timesteps(20)
    timesteps = scheduler.timesteps.tolist()
    cumprods = [float(scheduler.alphas_cumprod[timestep]) for timestep in timesteps]
    sigmas = (*(flow_level(a) for a in cumprods), 0.0)
    theirs = NOISE
    ours = start_scale(sigmas[0]) * NOISE
    kernel = make_kernel("ddim", 0.0, sigmas)
    for step, (timestep, alpha_cumprod) in enumerate(zip(timesteps, cumprods, strict=True)):
        output = toy_epsilon(theirs, alpha_cumprod)
        theirs = scheduler.step(output, timestep, theirs, eta=0.0).prev_sample
        sigma, sigma_next = (NOISE.new_full((2,), sigmas[place]) for place in (step, step + 1))
        x = from_flow(ours, sigma)
        velocity = velocity_from_epsilon(x, toy_epsilon(x, alpha_cumprod), sigma)
        if stepper == "euler":
            ours = euler(ours, velocity, sigma, sigma_next)
        else:
            ours = kernel.transition(ours, velocity, sigma, sigma_next).mean
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
