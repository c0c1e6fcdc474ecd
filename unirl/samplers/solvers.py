"""Deterministic solvers, for the steps that are not stochastic.

In goes a velocity, out comes the next latents. All of them are written on the predicted clean
image m = x - s v: the first-order step to level s' is r x + (1 - r) m with r = s' / s, which is
the Euler step x + v dt, DDIM without noise and DPM-Solver++ 1 alike. Higher orders add a multiple
of how m changed since the step before, measured in lambda = log((1 - s) / s).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from unirl.core.errors import ConfigError
from unirl.samplers.kernels import euler


class Solver(Protocol):
    """One denoising of one batch: a solver of higher order remembers the step before."""

    def step(self, latents: Tensor, velocity: Tensor, step: int, restarted: Tensor) -> Tensor:
        """The latents [B, *latent] at level step + 1, for latents and velocity at level `step`.

        `restarted` [B] bool marks rows that must not use the step before, because it was
        stochastic or there was none: they take a first-order step.
        """
        ...


def make_solver(name: str, sigmas: tuple[float, ...]) -> Solver:
    """The solver `name` for one denoising over the T+1 levels `sigmas`."""
    if name not in _SOLVERS:
        known = ", ".join(_SOLVERS)
        raise ConfigError(f"sampling.solver is {name!r}, which is not known: there are {known}.")
    return _SOLVERS[name](sigmas)


class Euler:
    """First order: x + v dt."""

    def __init__(self, sigmas: tuple[float, ...]) -> None:
        self._sigmas = sigmas

    def step(self, latents: Tensor, velocity: Tensor, step: int, restarted: Tensor) -> Tensor:
        sigma = latents.new_full((len(latents),), self._sigmas[step])
        sigma_next = latents.new_full((len(latents),), self._sigmas[step + 1])
        return euler(latents, velocity, sigma, sigma_next)


class DpmSolverPlusPlus2M:
    """DPM-Solver++ 2M (arXiv:2211.01095, algorithm 2), as diffusers' DPMSolverMultistepScheduler.

    The last step is of first order, as there with a last level of 0. After a first level of 1,
    where lambda is -infinity, the second step is of first order too, by the formula's own limit;
    diffusers' flow schedules start at 0.999 instead.
    """

    def __init__(self, sigmas: tuple[float, ...]) -> None:
        self._sigmas = sigmas
        self._lambdas = [_log_snr(sigma) for sigma in sigmas]
        self._clean_before: Tensor | None = None

    def step(self, latents: Tensor, velocity: Tensor, step: int, restarted: Tensor) -> Tensor:
        clean, before = latents - self._sigmas[step] * velocity, self._clean_before
        self._clean_before = clean
        r = self._sigmas[step + 1] / self._sigmas[step]
        if before is None or step == len(self._sigmas) - 2:
            return r * latents + (1 - r) * clean
        ahead = _extrapolated(clean, before, _reach(self._lambdas, step), restarted)
        return r * latents + (1 - r) * ahead


@dataclass(frozen=True)
class _Step:
    """What UniPC remembers of a step."""

    latents: Tensor
    """[B, *latent] corrected, where the step began."""
    clean: Tensor
    """[B, *latent] the clean image predicted there."""
    clean_before: Tensor
    """[B, *latent] that of the step before; only read where `second_order`."""
    second_order: Tensor
    """[B] bool."""


class UniPC:
    """UniPC of order 2 with B2(h) (arXiv:2302.04867), as diffusers' UniPCMultistepScheduler.

    Its predictor is DPM-Solver++ 2M. Before it, the corrector (algorithm 1) takes the step before
    once more, now that the prediction at its end is known, and so moves the latents; rows that
    restarted stay where they are. The last step is of first order. A first level of 1 counts as
    1 - 1e-6, as in diffusers: lambda would be -infinity, and how far it is from there matters.
    """

    def __init__(self, sigmas: tuple[float, ...]) -> None:
        self._sigmas = tuple(min(sigma, _LARGEST) for sigma in sigmas)
        self._lambdas = [_log_snr(sigma) for sigma in self._sigmas]
        self._last: _Step | None = None

    def step(self, latents: Tensor, velocity: Tensor, step: int, restarted: Tensor) -> Tensor:
        clean, last = latents - self._sigmas[step] * velocity, self._last
        r = self._sigmas[step + 1] / self._sigmas[step]
        if last is None:
            self._last = _Step(latents, clean, clean, torch.zeros_like(restarted))
            return r * latents + (1 - r) * clean
        corrected = self._corrected(last, clean, step)
        latents = torch.where(_per_row(restarted, latents), latents, corrected)
        self._last = _Step(latents, clean, last.clean, ~restarted)
        if step == len(self._sigmas) - 2:
            return r * latents + (1 - r) * clean
        ahead = _extrapolated(clean, last.clean, _reach(self._lambdas, step), restarted)
        return r * latents + (1 - r) * ahead

    def _corrected(self, last: _Step, clean: Tensor, step: int) -> Tensor:
        """[B, *latent] the end of the step before, with the clean image predicted there."""
        r = self._sigmas[step] / self._sigmas[step - 1]
        change = clean - last.clean
        correction = 0.5 * change
        if step >= 2:
            rho_before, rho = _corrector_weights(self._lambdas, step)
            both = rho_before * (last.clean_before - last.clean) + rho * change
            correction = torch.where(_per_row(last.second_order, clean), both, correction)
        return r * last.latents + (1 - r) * (last.clean + correction)


_SOLVERS: dict[str, Callable[[tuple[float, ...]], Solver]] = {
    "euler": Euler,
    "dpmpp_2m": DpmSolverPlusPlus2M,
    "unipc": UniPC,
}

_LARGEST = float(torch.tensor(1 - 1e-6))
"""1 - 1e-6 as float32 has it: 1 - sigma is then 1.3 % larger, as in diffusers."""


def _log_snr(sigma: float) -> float:
    """lambda = log((1 - sigma) / sigma), infinite at both ends."""
    if sigma in (0.0, 1.0):
        return math.inf if sigma == 0 else -math.inf
    return math.log((1 - sigma) / sigma)


def _extrapolated(clean: Tensor, before: Tensor, reach: float, restarted: Tensor) -> Tensor:
    """The clean image carried on along its last change; as it is in rows that restarted."""
    return clean + torch.where(_per_row(restarted, clean), 0.0, reach * (clean - before))


def _reach(lambdas: list[float], step: int) -> float:
    """Half this step over the step before, in lambda: h / (2 h_before).

    0 where the step before began at level 1, infinitely far away.
    """
    h, h_before = lambdas[step + 1] - lambdas[step], lambdas[step] - lambdas[step - 1]
    return 0.5 * h / h_before


def _corrector_weights(lambdas: list[float], step: int) -> tuple[float, float]:
    """(weight of the step before the last one over its r, weight of the newest prediction).

    Solves R rho = b of arXiv:2302.04867, theorem 3.1, for order 2 and B2(h) = e^h - 1, h < 0.
    """
    h = lambdas[step - 1] - lambdas[step]
    r = (lambdas[step - 2] - lambdas[step - 1]) / -h
    scale = math.expm1(h)
    phi_2 = scale / h - 1
    phi_3 = phi_2 / h - 0.5
    b_1, b_2 = phi_2 / scale, 2 * phi_3 / scale
    rho_before = (b_2 - b_1) / (r - 1)
    return rho_before / r, b_1 - rho_before


def _per_row(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (like.ndim - 1))
