"""The ddim kernel in flow coordinates against diffusers' DDIM and DDPM schedulers in their own."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import Tensor

from unirl.samplers.gaussian import Gaussian
from unirl.samplers.kernels import make_kernel
from unirl.samplers.noise import keyed_noise
from unirl.samplers.parametrisation import (
    flow_level,
    from_flow,
    to_flow,
    velocity_from_epsilon,
    velocity_from_v,
)

SETTINGS = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "clip_sample": False,
}
"""Those of Stable Diffusion."""
NUM_STEPS = 10
VELOCITY_OF = {"epsilon": velocity_from_epsilon, "v_prediction": velocity_from_v}


def noise(name: str) -> Tensor:
    return keyed_noise([f"{name}/0", f"{name}/1", f"{name}/2"], (4, 5, 5)).double()


def alpha_cumprods(scheduler: DDIMScheduler, timestep: int) -> tuple[float, float]:
    """At a timestep and where the step from it goes, 1 at the end."""
    before = timestep - scheduler.config["num_train_timesteps"] // NUM_STEPS
    table = scheduler.alphas_cumprod
    return float(table[timestep]), float(table[before]) if before >= 0 else 1.0


def flow_transition(
    prediction: str, eta: float, x: Tensor, output: Tensor, levels: tuple[float, float]
) -> Gaussian:
    """The kernel's Gaussian, in flow coordinates, of a model that predicts `output` at x."""
    s, s_next = (x.new_full((len(x),), level) for level in levels)
    kernel = make_kernel("ddim", eta, (*levels, 0.0))
    return kernel.transition(to_flow(x, s), VELOCITY_OF[prediction](x, output, s), s, s_next)


def in_model_coordinates(gaussian: Gaussian, level: float) -> Gaussian:
    s = gaussian.mean.new_full((len(gaussian.mean),), level)
    return Gaussian(from_flow(gaussian.mean, s), from_flow(gaussian.std, s))


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_every_step_equals_the_ddim_scheduler(prediction: str, eta: float) -> None:
    scheduler = DDIMScheduler(**SETTINGS, prediction_type=prediction)
    scheduler.set_timesteps(NUM_STEPS)
    x, output, fresh = noise("x"), noise("output"), noise("fresh")
    for timestep in scheduler.timesteps.tolist():
        start, end = (flow_level(a) for a in alpha_cumprods(scheduler, timestep))
        ours = in_model_coordinates(flow_transition(prediction, eta, x, output, (start, end)), end)
        theirs = scheduler.step(output, timestep, x, eta=eta, variance_noise=fresh).prev_sample
        torch.testing.assert_close(ours.sample(fresh), theirs, rtol=1e-5, atol=1e-5)
        without = scheduler.step(output, timestep, x, eta=eta, variance_noise=0 * fresh).prev_sample
        torch.testing.assert_close(ours.mean, without, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_eta_one_is_the_ancestral_sampling_of_the_ddpm_scheduler(prediction: str) -> None:
    scheduler = DDPMScheduler(**SETTINGS, prediction_type=prediction)
    scheduler.set_timesteps(NUM_STEPS)
    table = scheduler.alphas_cumprod
    x, output = noise("x"), noise("output")
    *stochastic, last = scheduler.timesteps.tolist()
    for timestep, following in zip(stochastic, [*stochastic[1:], last], strict=True):
        levels = flow_level(float(table[timestep])), flow_level(float(table[following]))
        ours = in_model_coordinates(flow_transition(prediction, 1.0, x, output, levels), levels[1])
        for seed in (0, 1):
            drawn = torch.randn(
                x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype
            )
            theirs = scheduler.step(
                output, timestep, x, generator=torch.Generator().manual_seed(seed)
            ).prev_sample
            torch.testing.assert_close(ours.sample(drawn), theirs, rtol=1e-5, atol=1e-5)


def test_log_probs_differ_from_those_in_model_coordinates_by_a_constant_and_ratios_not_at_all():
    alpha_cumprod, following = 0.3, 0.7
    levels = flow_level(alpha_cumprod), flow_level(following)
    x, old, new, fresh = noise("x"), noise("old"), noise("new"), noise("fresh")
    after = in_model_coordinates(flow_transition("epsilon", 0.8, x, old, levels), levels[1])
    x_next = after.sample(fresh)
    y_next = to_flow(x_next, x.new_full((len(x),), levels[1]))
    ours, theirs = [], []
    for output in (old, new):
        ours.append(flow_transition("epsilon", 0.8, x, output, levels).log_prob(y_next))
        theirs.append(ddpo_log_prob(x, output, x_next, alpha_cumprod, following, eta=0.8))
    constant = math.log(math.sqrt(following) + math.sqrt(1 - following))
    torch.testing.assert_close(ours[0] - theirs[0], torch.full_like(ours[0], constant))
    torch.testing.assert_close(ours[1] - ours[0], theirs[1] - theirs[0])
    assert (ours[1] - ours[0]).abs().min() > 0.01


def ddpo_log_prob(
    x: Tensor, epsilon: Tensor, x_next: Tensor, a: float, a_next: float, eta: float
) -> Tensor:
    """[B] DDIM's eq. 12 and 16 as they are printed, mean over latent elements."""
    std = eta * math.sqrt((1 - a_next) / (1 - a)) * math.sqrt(1 - a / a_next)
    clean = (x - math.sqrt(1 - a) * epsilon) / math.sqrt(a)
    mean = math.sqrt(a_next) * clean + math.sqrt(1 - a_next - std**2) * epsilon
    return torch.distributions.Normal(mean, std).log_prob(x_next).flatten(1).mean(dim=1)
