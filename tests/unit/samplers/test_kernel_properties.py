"""What every transition kernel has to be, whatever its formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from unirl.samplers.gaussian import Gaussian
from unirl.samplers.kernels import euler, make_kernel
from unirl.samplers.noise import keyed_noise

KERNELS = ("flow", "dance", "flash", "cps", "ddim")
REVERSE_SDES = ("flow", "dance", "flash")
SIGMAS = (1.0, 0.9, 0.75, 0.5, 0.2, 0.05, 0.0)
STEPS = range(len(SIGMAS) - 1)
INNER_STEPS = range(1, len(SIGMAS) - 2)
LATENTS, VELOCITY, NOISE = (keyed_noise([f"{k}/0", f"{k}/1"], (4, 3, 6)) for k in "xvz")


def levels(step: int, like: Tensor = LATENTS) -> tuple[Tensor, Tensor]:
    rows = like.new_empty(len(like))
    return torch.full_like(rows, SIGMAS[step]), torch.full_like(rows, SIGMAS[step + 1])


def transition(
    name: str, step: int, latents: Tensor = LATENTS, velocity: Tensor = VELOCITY, eta: float = 0.7
) -> Gaussian:
    sigma, sigma_next = levels(step, latents)
    return make_kernel(name, eta, SIGMAS).transition(latents, velocity, sigma, sigma_next)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("step", [0, *INNER_STEPS])
def test_log_probs_are_those_of_torch_distributions(name: str, step: int) -> None:
    gaussian = transition(name, step)
    value = gaussian.sample(1.3 * NOISE)
    reference = Normal(gaussian.mean, gaussian.std.expand_as(gaussian.mean)).log_prob(value)
    torch.testing.assert_close(gaussian.log_prob(value), reference.flatten(1).mean(dim=1))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("step", STEPS)
def test_nothing_is_undefined_from_the_first_level_to_the_last(name: str, step: int) -> None:
    gaussian = transition(name, step)
    assert gaussian.mean.isfinite().all()
    assert gaussian.std.isfinite().all()
    # The kernels that place fresh noise at level s' have none left at 0, the SDEs have.
    is_sharp = SIGMAS[step + 1] == 0 and name in ("cps", "ddim")
    assert bool((gaussian.std > 0).all()) is not is_sharp


@pytest.mark.parametrize("name", KERNELS)
def test_a_single_step_from_noise_to_image_is_defined(name: str) -> None:
    kernel = make_kernel(name, 0.7, (1.0, 0.0))
    gaussian = kernel.transition(LATENTS, VELOCITY, torch.ones(2), torch.zeros(2))
    assert gaussian.mean.isfinite().all()
    assert gaussian.std.isfinite().all()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("step", STEPS)
def test_the_mean_tends_to_the_euler_step_with_the_square_of_the_noise(
    name: str, step: int
) -> None:
    latents, velocity = LATENTS.double(), VELOCITY.double()
    target = euler(latents, velocity, *levels(step, latents))
    near, nearer = (
        (transition(name, step, latents, velocity, eta).mean - target).abs().max().item()
        for eta in (2e-3, 1e-3)
    )
    assert near < 1e-3
    assert nearer == pytest.approx(near / 4, rel=1e-3, abs=1e-12)
    std = transition(name, step, latents, velocity, 1e-3).std
    torch.testing.assert_close(
        2 * std, transition(name, step, eta=2e-3).std.double(), rtol=1e-5, atol=0
    )
    assert not transition(name, step, eta=0.0).std.any()


@pytest.mark.parametrize("step", STEPS)
def test_dance_and_flash_are_flow_at_a_noise_level_of_their_own(step: int) -> None:
    s = SIGMAS[step]
    safe = SIGMAS[1] if s == 1 else s
    per_eta = math.sqrt((1 - safe) / s)
    flash = 0.05 + (1 - 0.05) * s
    for name, eta in (("dance", 0.4 * per_eta), ("flash", 0.4 * flash * per_eta)):
        own, flow = transition(name, step, eta=0.4), transition("flow", step, eta=eta)
        torch.testing.assert_close(own.mean, flow.mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own.std, flow.std, rtol=1e-5, atol=0)


@pytest.mark.parametrize("step", INNER_STEPS)
def test_ddim_is_cps_at_a_noise_level_of_its_own(step: int) -> None:
    s, s_next = SIGMAS[step], SIGMAS[step + 1]
    kept = (s_next / (1 - s_next)) / (s / (1 - s))
    angle = math.asin(0.8 * math.sqrt(1 - kept**2))
    ddim, cps = transition("ddim", step, eta=0.8), transition("cps", step, eta=angle * 2 / math.pi)
    torch.testing.assert_close(ddim.mean, cps.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ddim.std, cps.std, rtol=1e-5, atol=0)


def test_flash_takes_the_ends_of_its_own_schedule() -> None:
    kernel = make_kernel("flash", 1.0, (0.8, 0.6, 0.1, 0.0))
    sigma, sigma_next = torch.tensor([0.8, 0.6]), torch.tensor([0.6, 0.1])
    std = kernel.transition(LATENTS, VELOCITY, sigma, sigma_next).std.flatten()
    expected = [(0.1 + 0.7 * s) * math.sqrt(s - t) for s, t in ((0.8, 0.6), (0.6, 0.1))]
    assert std.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_replay_from_stored_latents_gives_ratio_exactly_one(name: str, stored: torch.dtype) -> None:
    """Next latents go through the storage dtype before their log-prob is taken."""
    for step in [0, *INNER_STEPS]:
        before = LATENTS.to(stored)
        sampled = transition(name, step, before.float())
        after = sampled.sample(NOISE).to(stored)
        old = sampled.log_prob(after.float())
        new = transition(name, step, before.float()).log_prob(after.float())
        assert ((new - old).exp() == 1).all()


@pytest.mark.parametrize("name", KERNELS)
def test_a_log_prob_taken_before_the_rounding_breaks_the_ratio(name: str) -> None:
    """The control of the test above: this error is beyond usual clip ranges."""
    errors = []
    for step in [0, *INNER_STEPS]:
        gaussian = transition(name, step, LATENTS.bfloat16().float())
        exact = gaussian.sample(NOISE)
        stored = exact.bfloat16().float()
        errors += (gaussian.log_prob(stored) - gaussian.log_prob(exact)).abs().tolist()
    assert max(errors) > 1e-4


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", [(2, 72), (2, 12, 6), (2, 4, 3, 6), (2, 2, 2, 3, 6)])
def test_latents_of_equal_content_agree_in_every_layout(name: str, shape: tuple[int, ...]) -> None:
    for step in INNER_STEPS:
        flat = transition(name, step)
        laid_out = transition(name, step, LATENTS.view(shape), VELOCITY.view(shape))
        other = transition(name, step, LATENTS.view(shape), VELOCITY.view(shape) + 0.1)
        assert torch.equal(laid_out.mean.view_as(flat.mean), flat.mean)
        assert laid_out.std.shape == (2, *[1] * (len(shape) - 1))
        torch.testing.assert_close(
            laid_out.log_prob(NOISE.view(shape)), flat.log_prob(NOISE), rtol=1e-5, atol=0
        )
        moved = transition(name, step, velocity=VELOCITY + 0.1)
        torch.testing.assert_close(laid_out.kl(other), flat.kl(moved), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_equal_finite_differences(name: str) -> None:
    kernel = make_kernel(name, 0.7, SIGMAS)
    inputs = [t[:, :2, 0, :2].double().requires_grad_() for t in (LATENTS, VELOCITY, NOISE)]
    steps = [
        torch.tensor([0.75, 0.2], dtype=torch.float64, requires_grad=True),
        torch.tensor([0.5, 0.05], dtype=torch.float64, requires_grad=True),
    ]

    def outputs(x: Tensor, v: Tensor, value: Tensor, sigma: Tensor, sigma_next: Tensor):
        gaussian = kernel.transition(x, v, sigma, sigma_next)
        return gaussian.mean, gaussian.std, gaussian.log_prob(value)

    assert torch.autograd.gradcheck(outputs, (*inputs, *steps))


def test_ddim_keeps_a_sample_on_the_noise_level_it_goes_to() -> None:
    """With x0 and e standard normal, x at level s has variance (1-s)^2 + s^2, before and after."""
    clean, noise = (keyed_noise([key], (200_000,)) for key in ("clean", "noise"))
    fresh = keyed_noise(["fresh"], (200_000,))
    for s, s_next in ((1.0, 0.7), (0.7, 0.3), (0.3, 0.05)):
        latents = (1 - s) * clean + s * noise
        gaussian = make_kernel("ddim", 1.0, SIGMAS).transition(
            latents, noise - clean, torch.tensor([s]), torch.tensor([s_next])
        )
        variance = float(gaussian.sample(fresh).var())
        assert variance == pytest.approx((1 - s_next) ** 2 + s_next**2, rel=0.02)
