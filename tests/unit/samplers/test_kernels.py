"""Transition kernels against public implementations and their own limits."""

from __future__ import annotations

import math

import pytest
import torch
from golden_inputs import golden, golden_tensors
from torch import Tensor

from unirl.samplers.gaussian import Gaussian
from unirl.samplers.kernels import euler, make_kernel

REFERENCE = golden("kernels.json")
TENSORS = golden_tensors()
SCHEDULES = {name: tuple(sigmas) for name, sigmas in REFERENCE["sigmas"].items()}
LOG_2PI = math.log(2 * math.pi)


def transition_at(
    name: str, eta: float, sigmas: tuple[float, ...], step: int, layout: str
) -> tuple[Gaussian, Tensor]:
    """The Gaussian of one step of the reference inputs, and the next latents to score."""
    inputs = TENSORS[layout]
    sigma = torch.full((2,), sigmas[step])
    sigma_next = torch.full((2,), sigmas[step + 1])
    gaussian = make_kernel(name, eta, sigmas).transition(inputs.x, inputs.v, sigma, sigma_next)
    return gaussian, inputs.next_latents(sigma[0], sigma_next[0])


def full_std(case: dict, sigmas: tuple[float, ...]) -> float:
    """The step's standard deviation; the flow reference returns it without sqrt(-dt)."""
    (std,) = case["std_as_returned"]
    if case["kernel"] != "flow":
        return std
    return std * math.sqrt(sigmas[case["step"]] - sigmas[case["step"] + 1])


def test_the_reference_covers_three_kernels_on_four_schedules_and_two_layouts():
    cases = {(c["kernel"], c["schedule"], c["shape"]) for c in REFERENCE["kernels"]}
    assert len(REFERENCE["kernels"]) == 120
    assert len(cases) == 3 * 4 * 2


@pytest.mark.parametrize("kernel", ["flow", "dance", "cps"])
def test_mean_and_std_equal_the_public_implementations(kernel):
    for case in REFERENCE["kernels"]:
        if case["kernel"] != kernel:
            continue
        sigmas = SCHEDULES[case["schedule"]]
        gaussian, _ = transition_at(kernel, 0.7, sigmas, case["step"], case["shape"])
        first = torch.tensor(case["mean_first4"])
        # dance's drift grows as 1 / sigma and cancels digits at sigma = 0.001
        rtol = 1e-4 if kernel == "dance" else 2e-5
        torch.testing.assert_close(gaussian.mean.flatten()[:4], first, rtol=rtol, atol=2e-6)
        total = float(gaussian.mean.double().sum())
        assert total == pytest.approx(case["mean_sum"], rel=1e-4, abs=2e-4)
        assert float(gaussian.std[0]) == pytest.approx(full_std(case, sigmas), rel=2e-6, abs=1e-9)


@pytest.mark.parametrize("kernel", ["flow", "dance"])
def test_log_prob_equals_the_public_implementations(kernel):
    for case in REFERENCE["kernels"]:
        if case["kernel"] == kernel:
            sigmas = SCHEDULES[case["schedule"]]
            gaussian, value = transition_at(kernel, 0.7, sigmas, case["step"], case["shape"])
            expected = torch.tensor(case["log_prob"])
            torch.testing.assert_close(gaussian.log_prob(value), expected, rtol=2e-4, atol=2e-5)


def test_cps_log_prob_equals_the_ports_after_adding_the_normaliser_they_drop():
    compared = 0
    for case in REFERENCE["kernels"]:
        sigmas = SCHEDULES[case["schedule"]]
        if case["kernel"] != "cps" or sigmas[case["step"] + 1] == 0:
            continue
        gaussian, value = transition_at("cps", 0.7, sigmas, case["step"], case["shape"])
        std = gaussian.std.flatten()
        normalised = (gaussian.log_prob(value) + std.log() + LOG_2PI / 2) * 2 * std**2
        expected = torch.tensor(case["log_prob"])
        torch.testing.assert_close(normalised, expected, rtol=2e-5, atol=2e-6)
        compared += 1
    assert compared == 32


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_dance_is_flow_with_a_noise_level_that_depends_on_sigma(schedule):
    sigmas = SCHEDULES[schedule]
    for step in range(len(sigmas) - 1):
        safe = sigmas[1] if sigmas[step] == 1 else sigmas[step]
        matching = 0.4 * math.sqrt((1 - safe) / sigmas[step])
        dance, value = transition_at("dance", 0.4, sigmas, step, "img")
        flow, _ = transition_at("flow", matching, sigmas, step, "img")
        torch.testing.assert_close(flow.mean, dance.mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(flow.std, dance.std, rtol=1e-5, atol=0)
        torch.testing.assert_close(
            flow.log_prob(value), dance.log_prob(value), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("kernel", ["flow", "dance", "cps"])
@pytest.mark.parametrize("layout", ["img", "packed"])
def test_without_noise_every_kernel_takes_the_euler_step(kernel, layout):
    sigmas = SCHEDULES["linspace_shift3"]
    inputs = TENSORS[layout]
    for step in range(len(sigmas) - 1):
        gaussian, _ = transition_at(kernel, 0.0, sigmas, step, layout)
        sigma, sigma_next = torch.full((2,), sigmas[step]), torch.full((2,), sigmas[step + 1])
        expected = euler(inputs.x, inputs.v, sigma, sigma_next)
        torch.testing.assert_close(gaussian.mean, expected, rtol=1e-5, atol=1e-5)
        assert not gaussian.std.any()


def test_cps_at_its_largest_noise_level_is_finite_and_keeps_the_noise_amplitude():
    sigmas = SCHEDULES["linspace_shift1"]
    gaussian, _ = transition_at("cps", 1.0, sigmas, 3, "img")
    clean = TENSORS["img"].x - sigmas[3] * TENSORS["img"].v
    torch.testing.assert_close(gaussian.mean, (1 - sigmas[4]) * clean, rtol=1e-5, atol=1e-5)
    assert float(gaussian.std[0]) == pytest.approx(sigmas[4])


def test_a_first_level_just_below_one_is_as_noisy_as_one():
    rest = SCHEDULES["linspace_shift3"][1:]
    near, _ = transition_at("flow", 0.7, [0.9997, *rest], 0, "img")
    one, _ = transition_at("flow", 0.7, [1.0, *rest], 0, "img")
    torch.testing.assert_close(near.std, one.std, rtol=5e-3, atol=0)


@pytest.mark.parametrize("kernel", ["flow", "dance", "flash", "cps", "ddim"])
def test_samples_of_a_batch_may_stand_at_different_noise_levels(kernel):
    sigmas = SCHEDULES["linspace_shift3"]
    inputs = TENSORS["img"]
    sigma, sigma_next = torch.tensor([sigmas[0], sigmas[4]]), torch.tensor([sigmas[1], sigmas[5]])
    mixed = make_kernel(kernel, 0.7, sigmas).transition(inputs.x, inputs.v, sigma, sigma_next)
    for row, step in enumerate((0, 4)):
        alone, _ = transition_at(kernel, 0.7, sigmas, step, "img")
        assert torch.equal(mixed.mean[row], alone.mean[row])
        assert torch.equal(mixed.std[row], alone.std[row])


@pytest.mark.parametrize(
    ("latents", "velocity", "sigma"),
    [
        ((2, 3), (2, 4), (2,)),
        ((2, 3), (2, 3), (1,)),
        ((2, 3), (2, 3), (2, 1)),
        ((2, 3), (2, 3), ()),
    ],
)
def test_shapes_that_do_not_fit_are_refused(latents, velocity, sigma):
    kernel = make_kernel("flow", 0.7, (1.0, 0.5, 0.0))
    with pytest.raises(ValueError, match="do not fit"):
        kernel.transition(
            torch.zeros(latents), torch.zeros(velocity), torch.ones(sigma), torch.ones(sigma)
        )


def test_later_levels_near_one_keep_their_own_noise() -> None:
    """A schedule with a large shift has several levels above 0.999; only the first needs help."""
    sigmas = (1.0, 0.9998, 0.9993, 0.0)
    kernel = make_kernel("flow", 0.7, sigmas)
    zeros = torch.zeros(1, 2)
    step = kernel.transition(zeros, zeros, torch.tensor([0.9993]), torch.tensor([0.99]))
    expected = 0.7 * (0.9993 / (1 - 0.9993)) ** 0.5 * (0.9993 - 0.99) ** 0.5
    assert step.std.flatten()[0].item() == pytest.approx(expected, rel=1e-3)
