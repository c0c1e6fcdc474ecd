"""Noise levels of a denoising: T+1 floats that fall strictly from the largest to 0.0.

Pure functions of the number of steps. A model family that is deployed with a schedule of its own
gives that one; these are for models without, and for `sampling.sigma_schedule`.
"""

from __future__ import annotations

import math

import torch

from unirl.core.errors import ConfigError

Sigmas = tuple[float, ...]

_SMALLEST = 1 / 1000
"""The smallest level above 0 of karras and exponential schedules, as in diffusers."""


def custom_sigmas(kind: str, num_steps: int, shift: float | None) -> Sigmas:
    """The levels of sampling.sigma_schedule=kind: linear, karras or exponential; shift None is 1.

    As in diffusers a shift moves all levels of a linear schedule, and of the other two the
    smallest one, from where they are spaced anew.

    Raises ConfigError for an unknown kind and where two levels coincide in float32.
    """
    shift = 1.0 if shift is None else shift
    (smallest,) = shifted((_SMALLEST,), shift)
    match kind:
        case "linear":
            sigmas = shifted(linear_sigmas(num_steps), shift)
        case "karras":
            sigmas = karras_sigmas(num_steps, smallest, 1.0)
        case "exponential":
            sigmas = exponential_sigmas(num_steps, smallest, 1.0)
        case _:
            raise ConfigError(
                f"sampling.sigma_schedule is {kind!r}, which is not known: there are linear, "
                "karras and exponential, and model for the model's own."
            )
    if not torch.tensor(sigmas).diff().lt(0).all():
        raise ConfigError(
            f"sampling.shift={shift:g} leaves no room between the noise levels of "
            f"sampling.num_inference_steps={num_steps}. Set sampling.shift nearer to 1."
        )
    return sigmas


def linear_sigmas(num_steps: int) -> Sigmas:
    """1, 1 - 1/T, ..., 1/T, 0."""
    return tuple((num_steps - step) / num_steps for step in range(num_steps + 1))


def shifted(sigmas: Sigmas, shift: float) -> Sigmas:
    """s' = shift s / (1 + (shift - 1) s) (arXiv:2403.03206, eq. 23), applied once.

    diffusers' FlowMatchEulerDiscreteScheduler applies a static shift twice with
    set_timesteps(num_steps), on the ends of the grid and on the grid. Written so that 0 and 1 stay
    exactly where they are: a stochastic step divides by 1 - s.
    """
    return tuple(sigma / (sigma + (1 - sigma) / shift) for sigma in sigmas)


def dynamic_shift(
    image_tokens: int,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
    base_tokens: int = 256,
    max_tokens: int = 4096,
) -> float:
    """mu, linear in the number of image tokens: base_shift at base_tokens, max_shift at max_tokens.

    More tokens carry more signal at the same noise, so larger images get more steps at high noise.
    """
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return base_shift + slope * (image_tokens - base_tokens)


def exponential_shift(sigmas: Sigmas, mu: float) -> Sigmas:
    """The shift by e^mu, with which dynamic_shift's mu is used."""
    return shifted(sigmas, math.exp(mu))


def stretched_to_terminal(sigmas: Sigmas, terminal: float) -> Sigmas:
    """1 - s scaled so that the last level above 0 is `terminal`, in (0, 1); T >= 2."""
    scale = (1 - terminal) / (1 - sigmas[-2])
    return (*(1 - (1 - sigma) * scale for sigma in sigmas[:-1]), 0.0)


def karras_sigmas(num_steps: int, sigma_min: float, sigma_max: float, rho: float = 7.0) -> Sigmas:
    """T levels from sigma_max to sigma_min, evenly spaced in s^(1/rho) (arXiv:2206.00364, eq. 5),
    then 0. The paper's levels are noise per signal; like diffusers' FlowMatchEulerDiscreteScheduler
    with use_karras_sigmas this spaces flow levels that way."""
    first, last = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return (*((first + at * (last - first)) ** rho for at in _ramp(num_steps)), 0.0)


def exponential_sigmas(num_steps: int, sigma_min: float, sigma_max: float) -> Sigmas:
    """T levels from sigma_max to sigma_min, evenly spaced in log s, then 0 (use_exponential_sigmas
    of diffusers' FlowMatchEulerDiscreteScheduler)."""
    first, last = math.log(sigma_max), math.log(sigma_min)
    return (*(math.exp(first + at * (last - first)) for at in _ramp(num_steps)), 0.0)


def thinned(sigmas: Sigmas, after_step: int, every: int) -> Sigmas:
    """The schedule with fewer steps after `after_step` (MixGRPO-Flash, arXiv:2507.21802).

    All levels up to index after_step + 1, where that step ends, then every `every`-th, and the last
    one in any case. Steps up to after_step keep their index. after_step = -1 thins from the start.
    """
    end = after_step + 1
    return (*sigmas[:end], *sigmas[end:-1:every], sigmas[-1])


def _ramp(num_steps: int) -> list[float]:
    """T numbers from 0 to 1; 0 alone for one step."""
    return [step / max(num_steps - 1, 1) for step in range(num_steps)]
