"""Noise schedules: their shape for any setting, and diffusers' numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from golden_inputs import golden
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.core.errors import ConfigError
from unirl.samplers.schedule import (
    custom_sigmas,
    dynamic_shift,
    exponential_shift,
    exponential_sigmas,
    karras_sigmas,
    linear_sigmas,
    shifted,
    stretched_to_terminal,
    thinned,
)

Sigmas = tuple[float, ...]
STEPS = (2, 5, 10, 28, 50)
GOLDEN = golden("kernels.json")["sigmas"]
by_property = settings(derandomize=True, deadline=None, max_examples=60)
num_steps_drawn = st.integers(2, 200)
shift_drawn = st.floats(0.05, 20)


def deployed(num_steps: int, mu: float | None = None, sigmas: Any = None, **config: Any) -> Sigmas:
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    scheduler.set_timesteps(None if sigmas is not None else num_steps, sigmas=sigmas, mu=mu)
    return tuple(scheduler.sigmas.tolist())


def grid(num_steps: int) -> np.ndarray:
    """The levels pipelines with a dynamic shift pass to their scheduler."""
    return np.linspace(1, 1 / num_steps, num_steps)


def assert_is_schedule(sigmas: Sigmas, num_steps: int, largest: float = 1.0) -> None:
    assert len(sigmas) == num_steps + 1
    assert sigmas[0] == largest
    assert sigmas[-1] == 0.0
    assert all(before > after for before, after in pairwise(sigmas))


@given(num_steps=num_steps_drawn, shift=shift_drawn)
@by_property
def test_shifted_schedules_fall_from_exactly_one_to_exactly_zero(
    num_steps: int, shift: float
) -> None:
    assert_is_schedule(linear_sigmas(num_steps), num_steps)
    assert_is_schedule(shifted(linear_sigmas(num_steps), shift), num_steps)
    assert_is_schedule(exponential_shift(linear_sigmas(num_steps), math.log(shift)), num_steps)
    terminal = stretched_to_terminal(shifted(linear_sigmas(num_steps), shift), 0.05)
    assert_is_schedule(terminal, num_steps)
    assert terminal[-2] == pytest.approx(0.05)


@given(
    num_steps=num_steps_drawn,
    ends=st.tuples(st.floats(1e-4, 0.3), st.floats(0.4, 1.0)),
    rho=st.floats(1, 10),
)
@by_property
def test_spaced_schedules_fall_from_the_largest_level_given_to_zero(
    num_steps: int, ends: tuple[float, float], rho: float
) -> None:
    smallest, largest = ends
    for sigmas in (
        karras_sigmas(num_steps, smallest, largest, rho),
        exponential_sigmas(num_steps, smallest, largest),
    ):
        assert_is_schedule(sigmas, num_steps, sigmas[0])
        assert sigmas[0] == pytest.approx(largest)
        assert sigmas[-2] == pytest.approx(smallest)


@given(
    kind=st.sampled_from(["linear", "karras", "exponential"]),
    num_steps=st.integers(1, 200),
    shift=st.none() | shift_drawn,
)
@by_property
def test_every_schedule_of_a_recipe_falls_from_one_to_zero(
    kind: str, num_steps: int, shift: float | None
) -> None:
    assert_is_schedule(custom_sigmas(kind, num_steps, shift), num_steps)


@given(num_steps=num_steps_drawn, after_step=st.integers(-1, 200), every=st.integers(1, 9))
@by_property
def test_a_thinned_schedule_keeps_the_steps_before_and_every_nth_after(
    num_steps: int, after_step: int, every: int
) -> None:
    after_step = min(after_step, num_steps - 1)
    sigmas = shifted(linear_sigmas(num_steps), 3.0)
    thin = thinned(sigmas, after_step, every)
    assert_is_schedule(thin, len(thin) - 1)
    assert thin[: after_step + 2] == sigmas[: after_step + 2]
    places = [sigmas.index(sigma) for sigma in thin]
    strides = [b - a for a, b in pairwise(places)][after_step + 1 :]
    assert all(stride == every for stride in strides[:-1])
    assert all(1 <= stride <= every for stride in strides[-1:])


@pytest.mark.parametrize(
    ("after_step", "every", "places"),
    [
        (3, 1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (3, 2, [0, 1, 2, 3, 4, 6, 8, 10]),
        (3, 4, [0, 1, 2, 3, 4, 8, 10]),
        (3, 99, [0, 1, 2, 3, 4, 10]),
        (8, 3, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (9, 3, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (-1, 5, [0, 5, 10]),
    ],
)
def test_thinning_by_hand(after_step: int, every: int, places: list[int]) -> None:
    sigmas = linear_sigmas(10)
    assert thinned(sigmas, after_step, every) == tuple(sigmas[place] for place in places)


@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("shift", [1.0, 3.0, 0.5])
def test_a_static_shift_equals_diffusers_on_given_levels(num_steps: int, shift: float) -> None:
    theirs = deployed(num_steps, sigmas=grid(num_steps), shift=shift)
    assert shifted(linear_sigmas(num_steps), shift) == pytest.approx(theirs, abs=1e-6)
    assert custom_sigmas("linear", num_steps, shift) == pytest.approx(theirs, abs=1e-6)


def test_set_timesteps_of_diffusers_applies_a_static_shift_twice_and_ours_once() -> None:
    twice = deployed(10, shift=3.0)
    once = custom_sigmas("linear", 10, 3.0)
    assert twice[-2] == pytest.approx(0.0089, abs=5e-5)
    assert once[-2] == 0.25
    (smallest,) = shifted((0.001,), 3.0)
    ends_shifted = tuple(1 + place / 9 * (smallest - 1) for place in range(10))
    assert shifted(ends_shifted, 3.0) == pytest.approx(twice[:-1], abs=1e-6)
    assert once == pytest.approx(GOLDEN["linspace_shift3"], abs=1e-6)
    assert twice == pytest.approx(GOLDEN["default_shift3"], abs=1e-6)


@pytest.mark.parametrize("tokens", [64, 256, 1024, 4096, 8192])
def test_the_dynamic_shift_equals_the_pipelines(tokens: int) -> None:
    assert dynamic_shift(tokens) == pytest.approx(calculate_shift(tokens))
    assert dynamic_shift(tokens, 0.3, 0.9, 100, 900) == pytest.approx(
        calculate_shift(tokens, 100, 900, 0.3, 0.9)
    )


def test_larger_images_get_more_noise() -> None:
    assert (dynamic_shift(256), dynamic_shift(4096)) == pytest.approx((0.5, 1.15))


@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("mu", [0.5, 1.15])
def test_an_exponential_shift_equals_diffusers_with_and_without_a_terminal(
    num_steps: int, mu: float
) -> None:
    plain = deployed(num_steps, mu, grid(num_steps), use_dynamic_shifting=True)
    ours = exponential_shift(linear_sigmas(num_steps), mu)
    assert ours == pytest.approx(plain, abs=1e-6)
    terminal = deployed(
        num_steps, mu, grid(num_steps), use_dynamic_shifting=True, shift_terminal=0.1
    )
    assert stretched_to_terminal(ours, 0.1) == pytest.approx(terminal, abs=1e-6)


@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize(
    ("kind", "spaced"), [("karras", karras_sigmas), ("exponential", exponential_sigmas)]
)
def test_spaced_schedules_equal_diffusers(
    kind: str, spaced: Callable[[int, float, float], Sigmas], num_steps: int
) -> None:
    theirs = deployed(num_steps, **{f"use_{kind}_sigmas": True})
    assert spaced(num_steps, 0.001, 1.0) == pytest.approx(theirs, abs=1e-6)
    assert custom_sigmas(kind, num_steps, None) == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("kind", ["karras", "exponential"])
def test_a_shift_moves_the_smallest_level_of_spaced_schedules_as_in_diffusers(
    kind: str, num_steps: int
) -> None:
    """diffusers' dynamic shift, which acts once, by the same factor."""
    config = {f"use_{kind}_sigmas": True, "use_dynamic_shifting": True}
    theirs = deployed(num_steps, math.log(3.0), **config)
    assert custom_sigmas(kind, num_steps, 3.0) == pytest.approx(theirs, abs=1e-6)
    assert theirs[-2] == pytest.approx(0.003 / 1.002)


def test_levels_that_coincide_in_float32_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.shift=1e\+09 leaves no room"):
        custom_sigmas("linear", 10, 1e9)


def test_an_unknown_spacing_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.sigma_schedule is 'beta'.*exponential"):
        custom_sigmas("beta", 10, None)
