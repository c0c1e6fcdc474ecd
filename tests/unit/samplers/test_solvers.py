"""Deterministic solvers against diffusers, exact solutions, and their own restarts."""

from __future__ import annotations

import pytest
import torch
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from torch import Tensor

from unirl.core.errors import ConfigError
from unirl.samplers.kernels import euler
from unirl.samplers.noise import keyed_noise
from unirl.samplers.schedule import linear_sigmas, shifted
from unirl.samplers.solvers import make_solver

REFERENCES = {"dpmpp_2m": DPMSolverMultistepScheduler, "unipc": UniPCMultistepScheduler}
SOLVERS = ("euler", *REFERENCES)
STEPS = (1, 2, 3, 5, 8, 14, 15, 30)
START = keyed_noise(["x/0", "x/1", "x/2"], (2, 4, 4))
MIXING = keyed_noise(["mixing"], (4, 4))[0] * 0.3


def velocity(latents: Tensor, sigma: float) -> Tensor:
    """Not linear in the latents and not constant in time; rows do not see each other."""
    return torch.tanh(latents @ MIXING) * (1 + sigma) + 0.3 * latents


def first(step: int, rows: int = len(START)) -> Tensor:
    return torch.full((rows,), step == 0)


def denoised(name: str, sigmas: tuple[float, ...], latents: Tensor = START) -> Tensor:
    solver = make_solver(name, sigmas)
    for step, sigma in enumerate(sigmas[:-1]):
        latents = solver.step(latents, velocity(latents, sigma), step, first(step, len(latents)))
    return latents


def flow_scheduler(
    name: str, shift: float, num_steps: int
) -> DPMSolverMultistepScheduler | UniPCMultistepScheduler:
    scheduler = REFERENCES[name](
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=shift,
        solver_order=2,
        lower_order_final=True,
        final_sigmas_type="zero",
    )
    scheduler.set_timesteps(num_steps)
    return scheduler


def assert_follows(scheduler, name: str, sigmas: tuple[float, ...]) -> None:
    """Every step, not only the last, is the scheduler's."""
    solver = make_solver(name, sigmas)
    ours = theirs = START
    for step, timestep in enumerate(scheduler.timesteps):
        sigma = float(scheduler.sigmas[step])
        theirs = scheduler.step(velocity(theirs, sigma), timestep, theirs).prev_sample
        ours = solver.step(ours, velocity(ours, sigmas[step]), step, first(step))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("num_steps", STEPS)
def test_every_step_equals_diffusers_on_its_own_flow_schedule(
    name: str, shift: float, num_steps: int
) -> None:
    scheduler = flow_scheduler(name, shift, num_steps)
    assert_follows(scheduler, name, tuple(scheduler.sigmas.tolist()))


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("num_steps", STEPS)
def test_every_step_equals_diffusers_on_a_schedule_that_starts_at_one(
    name: str, shift: float, num_steps: int
) -> None:
    """DPM-Solver++ takes the level as it is; UniPC's own set_timesteps puts 1 - 1e-6 there."""
    scheduler = flow_scheduler(name, shift, num_steps)
    sigmas = shifted(linear_sigmas(num_steps), shift)
    scheduler.sigmas = torch.tensor(sigmas)
    if name == "unipc":
        scheduler.sigmas[0] = 1 - 1e-6
    assert_follows(scheduler, name, sigmas)


def test_unipc_starts_where_diffusers_starts() -> None:
    assert float(flow_scheduler("unipc", 3.0, 10).sigmas[0]) == float(torch.tensor(1 - 1e-6))


def test_dpm_solver_of_diffusers_starts_below_one() -> None:
    assert float(flow_scheduler("dpmpp_2m", 1.0, 10).sigmas[0]) == pytest.approx(0.999)


def test_euler_is_bit_identical_to_the_euler_step() -> None:
    sigmas = shifted(linear_sigmas(5), 3.0)
    solver = make_solver("euler", sigmas)
    for step in range(5):
        v = velocity(START, sigmas[step])
        level, level_next = torch.full((3,), sigmas[step]), torch.full((3,), sigmas[step + 1])
        expected = euler(START, v, level, level_next)
        assert torch.equal(solver.step(START, v, step, first(step)), expected)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_first_and_last_step_are_euler_steps(name: str, num_steps: int) -> None:
    sigmas = linear_sigmas(num_steps)
    v = velocity(START, 1.0)
    one_step = make_solver(name, sigmas).step(START, v, 0, first(0))
    torch.testing.assert_close(one_step, START + (sigmas[1] - 1) * v, rtol=1e-5, atol=1e-5)
    solver = make_solver(name, sigmas)
    restarted = torch.ones(3, dtype=torch.bool)
    for step in range(num_steps):
        latents = solver.step(START, v, step, restarted)
        euler_step = START + (sigmas[step + 1] - sigmas[step]) * v
        torch.testing.assert_close(latents, euler_step, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("num_steps", STEPS)
def test_the_ends_of_the_schedule_give_finite_latents(name: str, num_steps: int) -> None:
    for shift in (0.2, 1.0, 12.0):
        assert denoised(name, shifted(linear_sigmas(num_steps), shift)).isfinite().all()


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("restart", [1, 2, 3, 6])
def test_a_restarted_row_goes_on_like_a_denoising_that_begins_there(
    name: str, restart: int
) -> None:
    """Row 1 jumps before step `restart`, as a stochastic step would; its neighbours do not."""
    sigmas = shifted(linear_sigmas(8), 2.0)
    landed = keyed_noise(["landed"], (2, 4, 4))
    solver, latents = make_solver(name, sigmas), START
    for step, sigma in enumerate(sigmas[:-1]):
        restarted = first(step)
        if step == restart:
            latents = torch.stack([latents[0], landed[0], latents[2]])
            restarted = torch.tensor([False, True, False])
        latents = solver.step(latents, velocity(latents, sigma), step, restarted)
    undisturbed = denoised(name, sigmas)
    assert torch.equal(latents[[0, 2]], undisturbed[[0, 2]])
    torch.testing.assert_close(latents[1:2], denoised(name, sigmas[restart:], landed))


@pytest.mark.parametrize("name", REFERENCES)
def test_steps_that_were_all_stochastic_may_be_left_out(name: str) -> None:
    """The loop does not call the solver where every row is stochastic."""
    sigmas = linear_sigmas(8)
    solver, latents = make_solver(name, sigmas), START
    for step in (0, 1, 4, 5, 6, 7):
        latents = START if step == 4 else latents
        restarted = torch.full((3,), step in (0, 4))
        latents = solver.step(latents, velocity(latents, sigmas[step]), step, restarted)
    torch.testing.assert_close(latents, denoised(name, sigmas[4:]))


@pytest.mark.parametrize("name", REFERENCES)
def test_layouts_of_equal_content_agree(name: str) -> None:
    sigmas = linear_sigmas(6)
    reference: Tensor | None = None
    for shape in ((3, 32), (3, 8, 4), (3, 2, 4, 4), (3, 2, 2, 2, 4)):
        solver, latents = make_solver(name, sigmas), START.view(shape)
        for step, sigma in enumerate(sigmas[:-1]):
            restarted = torch.tensor([step in (0, 2), step in (0, 4), step == 0])
            latents = solver.step(latents, torch.sin(latents * (1 + sigma)), step, restarted)
        if reference is None:
            reference = latents
        assert torch.equal(latents.view(3, 32), reference)


def gaussian_velocity(latents: Tensor, sigma: float) -> Tensor:
    """The exact velocity E[e - x0 | x] for x0 ~ N(0.5, 0.2^2)."""
    mean, std = 0.5, 0.2
    variance = ((1 - sigma) * std) ** 2 + sigma**2
    centred = latents - (1 - sigma) * mean
    return centred * (sigma - (1 - sigma) * std**2) / variance - mean


@pytest.mark.parametrize("name", REFERENCES)
def test_second_order_is_nearer_to_the_exact_solution_at_equal_steps(name: str) -> None:
    """That solution moves each quantile of the noise to the same quantile of the data."""
    exact = 0.5 + 0.2 * START

    def error(solver_name: str, num_steps: int) -> float:
        sigmas = linear_sigmas(num_steps)
        solver, latents = make_solver(solver_name, sigmas), START
        for step, sigma in enumerate(sigmas[:-1]):
            latents = solver.step(latents, gaussian_velocity(latents, sigma), step, first(step))
        return (latents - exact).abs().max().item()

    for num_steps in (20, 80):
        assert error(name, num_steps) < error("euler", num_steps) / 5
    assert error(name, 160) < error(name, 80) / 2.5


def test_an_unknown_solver_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.solver is 'heun'.*euler, dpmpp_2m, unipc"):
        make_solver("heun", (1.0, 0.0))
