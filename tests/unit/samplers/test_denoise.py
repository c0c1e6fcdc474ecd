"""The denoising loop: what is stepped how, and what is recorded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unirl.samplers.denoise import sample_trajectory
from unirl.samplers.kernels import make_kernel
from unirl.samplers.noise import keyed_noise
from unirl.samplers.solvers import make_solver

SIGMAS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
START = keyed_noise(["x", "y"], (2, 3, 3))


def pull_to_zero(latents: Tensor, sigma: Tensor, step: int = 0) -> Tensor:
    """The velocity whose clean image is 0 everywhere: x = sigma noise, v = noise."""
    return latents / sigma.view(-1, 1, 1, 1)


def step_noise(step: int) -> Tensor:
    return keyed_noise([f"x/{step}", f"y/{step}"], (2, 3, 3))


def denoise(sde_steps: tuple[int, ...], kernel: str = "flow", eta: float = 0.5):
    return sample_trajectory(
        pull_to_zero,
        START,
        SIGMAS,
        make_kernel(kernel, eta, SIGMAS),
        make_solver("euler", SIGMAS),
        (sde_steps,) * 2,
        step_noise,
    )


def test_an_ode_of_a_straight_flow_ends_exactly_where_it_points():
    trajectory = denoise(())
    torch.testing.assert_close(trajectory.final_latents, torch.zeros_like(START), atol=1e-6, rtol=0)


def test_euler_steps_equal_the_closed_form_of_a_constant_velocity():
    constant = torch.ones_like(START) * 0.3
    trajectory = sample_trajectory(
        lambda latents, sigma, step: constant,
        START,
        SIGMAS,
        make_kernel("flow", 0.5, SIGMAS),
        make_solver("euler", SIGMAS),
        ((), ()),
        step_noise,
    )
    torch.testing.assert_close(trajectory.final_latents, START - constant)


@pytest.mark.parametrize("sde_steps", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_exactly_the_stochastic_steps_are_recorded(sde_steps):
    trajectory = denoise(sde_steps)
    count = len(sde_steps)
    assert trajectory.latents.shape == (2, count, 2, 3, 3)
    assert trajectory.next_latents.shape == (2, count, 2, 3, 3)
    assert trajectory.log_probs.shape == (2, count)
    assert trajectory.final_latents.shape == START.shape


@pytest.mark.parametrize("kernel", ["flow", "dance", "cps"])
def test_recorded_log_probs_are_those_of_the_recorded_latents(kernel):
    trajectory = denoise((0, 2), kernel)
    for position, step in enumerate((0, 2)):
        sigma, sigma_next = torch.full((2,), SIGMAS[step]), torch.full((2,), SIGMAS[step + 1])
        latents = trajectory.latents[:, position]
        gaussian = make_kernel(kernel, 0.5, SIGMAS).transition(
            latents, pull_to_zero(latents, sigma), sigma, sigma_next
        )
        after = trajectory.next_latents[:, position]
        assert torch.equal(gaussian.log_prob(after), trajectory.log_probs[:, position])
        assert torch.equal(gaussian.sample(step_noise(step)), after)


def test_consecutive_stochastic_steps_join_up():
    trajectory = denoise((0, 1))
    assert torch.equal(trajectory.latents[:, 0], START)
    assert torch.equal(trajectory.next_latents[:, 0], trajectory.latents[:, 1])


def test_noise_is_asked_for_stochastic_steps_only():
    asked: list[int] = []

    def recording(step: int) -> Tensor:
        asked.append(step)
        return step_noise(step)

    kernel = make_kernel("flow", 0.5, SIGMAS)
    sample_trajectory(
        pull_to_zero,
        START,
        SIGMAS,
        kernel,
        make_solver("euler", SIGMAS),
        ((1, 3),) * 2,
        recording,
    )
    assert asked == [1, 3]


def test_half_precision_start_noise_is_denoised_in_float32():
    kernel = make_kernel("flow", 0.5, SIGMAS)
    solver = make_solver("euler", SIGMAS)
    trajectory = sample_trajectory(
        pull_to_zero, START.bfloat16(), SIGMAS, kernel, solver, ((0,),) * 2, step_noise
    )
    assert {trajectory.latents.dtype, trajectory.log_probs.dtype} == {torch.float32}


def test_sampling_keeps_no_graph():
    weight = torch.ones((), requires_grad=True)
    trajectory = sample_trajectory(
        lambda latents, sigma, step: latents * weight,
        START,
        SIGMAS,
        make_kernel("flow", 0.5, SIGMAS),
        make_solver("euler", SIGMAS),
        ((0,), (0,)),
        step_noise,
    )
    assert not trajectory.final_latents.requires_grad


def two_with_steps_of_their_own(solver: str, kept_steps: tuple[int, ...] = ()):
    return sample_trajectory(
        swirl,
        START,
        SIGMAS,
        make_kernel("flow", 0.5, SIGMAS),
        make_solver(solver, SIGMAS),
        ((1,), (3,)),
        step_noise,
        kept_steps,
    )


def swirl(latents: Tensor, sigma: Tensor, step: int) -> Tensor:
    """A velocity that bends, so that solvers of different order differ."""
    return (latents * (2 * sigma.view(-1, 1, 1, 1))).sin() + latents.flip(-1)


@pytest.mark.parametrize("solver", ["euler", "dpmpp_2m", "unipc"])
def test_a_sample_is_the_same_whatever_steps_its_neighbours_take(solver: str):
    together = two_with_steps_of_their_own(solver)
    for row, steps in enumerate(((1,), (3,))):
        alone = sample_trajectory(
            swirl,
            START[row : row + 1],
            SIGMAS,
            make_kernel("flow", 0.5, SIGMAS),
            make_solver(solver, SIGMAS),
            (steps,),
            lambda step, row=row: step_noise(step)[row : row + 1],
        )
        assert torch.equal(together.final_latents[row], alone.final_latents[0])
        assert torch.equal(together.latents[row], alone.latents[0])
        assert torch.equal(together.next_latents[row], alone.next_latents[0])
        assert torch.equal(together.log_probs[row], alone.log_probs[0])
    assert together.steps.tolist() == [[1], [3]]


@pytest.mark.parametrize("solver", ["dpmpp_2m", "unipc"])
def test_after_a_stochastic_step_a_solver_of_higher_order_starts_anew(solver: str):
    trajectory = two_with_steps_of_their_own(solver)
    after = trajectory.next_latents[:1, 0]
    fresh, known = make_solver(solver, SIGMAS), after
    for step in range(2, 5):
        sigma = torch.full((1,), SIGMAS[step])
        known = fresh.step(known, swirl(known, sigma, step), step, torch.tensor([step == 2]))
    assert torch.equal(known[0], trajectory.final_latents[0])


def test_kept_latents_are_the_states_before_the_steps_asked_for():
    trajectory = two_with_steps_of_their_own("euler", kept_steps=(0, 1, 3))
    assert trajectory.kept_latents.shape == (2, 3, 2, 3, 3)
    assert torch.equal(trajectory.kept_latents[:, 0], START)
    assert torch.equal(trajectory.kept_latents[0, 1], trajectory.latents[0, 0])
    assert torch.equal(trajectory.kept_latents[1, 2], trajectory.latents[1, 0])
