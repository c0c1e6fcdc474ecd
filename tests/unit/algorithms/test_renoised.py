"""Rows of the forward process: which noise, which levels, and the velocity they are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import policy, randomize_adapter, rollout_request, run_config, sample, scored
from builders import tiny_model as build_tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from renoised_inputs import SmoothModel, renoised_rows

from unirl.algorithms.renoised import (
    all_renoised,
    noise_levels,
    renoised,
    velocities_in,
    velocity_error,
    velocity_of,
)
from unirl.config.schema import AlgorithmConfig
from unirl.core.types import ScoredRollout
from unirl.distributed.sharding import own_part, own_prompts, sample_places
from unirl.models.tiny import TinyModel


def config(**keys: object) -> AlgorithmConfig:
    return run_config({f"algorithm.{name}": value for name, value in keys.items()}).algorithm


@pytest.fixture(scope="module")
def model() -> TinyModel:
    model = build_tiny_model()
    randomize_adapter(model)
    return model


def roll_out(model: TinyModel, **request: object) -> ScoredRollout:
    return scored(sample(model, rollout_request(sde_steps=(), **request)))  # type: ignore[arg-type]


# --- rows -----------------------------------------------------------------------------------------


def test_a_row_lies_on_the_line_from_its_clean_sample_to_its_noise(model):
    one = roll_out(model)
    rows = all_renoised(config(timesteps_per_sample=3), [one])
    assert len(rows) == 24
    assert rows.sample_index.tolist() == [*range(8)] * 3
    for row in range(24):
        clean = one.trajectory.final_latents[row % 8]
        t, noise = rows.time[row], rows.noise[row]
        torch.testing.assert_close(rows.noisy[row], (1 - t) * clean + t * noise)
        torch.testing.assert_close(rows.noisy[row] - t * rows.target[row], clean)
        assert rows.advantages[row] == one.advantages[row % 8]


def test_every_row_has_noise_of_its_own_and_the_same_when_asked_again(model):
    one = roll_out(model)
    rows, again = (all_renoised(config(), [one]) for _ in range(2))
    assert torch.equal(rows.noise, again.noise)
    assert torch.equal(rows.time, again.time)
    assert len(torch.unique(rows.noise.flatten(1), dim=0)) == len(rows)
    assert not torch.equal(all_renoised(config(), [roll_out(model, key="x")]).noise, rows.noise)


def test_selected_rows_are_the_rows_at_these_places(model):
    rows = all_renoised(config(), [roll_out(model)])
    index = torch.tensor([9, 2, 2])
    part = rows.select(index)
    for name in ("noisy", "target", "time", "advantages", "sample_index"):
        assert torch.equal(getattr(part, name), getattr(rows, name)[index])


def test_a_window_of_rollouts_counts_its_samples_on(model):
    first, second = roll_out(model, num_steps=3), roll_out(model, key="other", num_steps=4)
    rows = all_renoised(config(timesteps_per_sample=1), [first, second])
    apart = all_renoised(config(timesteps_per_sample=1), [second])
    late = rows.select(torch.arange(8, 16))
    assert late.sample_index.tolist() == [*range(8, 16)]
    assert torch.equal(late.noisy, apart.noisy)
    assert set(late.time.tolist()) <= {1.0, 0.75, 0.5, 0.25}
    assert torch.equal(velocity_of(model, late), velocity_of(model, apart))


def test_two_ranks_together_have_the_rows_of_one(model):
    """A rank has its own prompts; noise and levels follow the samples."""

    class TwoRanks:
        world_size = 2

        def __init__(self, rank: int) -> None:
            self.rank = rank

    request = rollout_request(sde_steps=(), num_prompts=4)
    whole = scored(sample(model, request))
    rows = all_renoised(config(), [whole])
    for rank in (TwoRanks(0), TwoRanks(1)):
        places = sample_places(own_prompts(4, rank), 4)  # type: ignore[arg-type]
        own = sample(model, own_part(request, rank))  # type: ignore[arg-type]
        part = replace(
            whole,
            request=own.request,
            trajectory=own.trajectory,
            conditioning=own.conditioning,
            places=places,
        )
        own_rows = all_renoised(config(), [part])
        same = torch.cat([places, places + 16])
        assert torch.equal(own_rows.time, rows.time[same])
        assert torch.equal(own_rows.noise, rows.noise[same])
        assert torch.equal(own_rows.advantages, rows.advantages[same])


def test_chosen_samples_have_the_rows_they_have_among_all(model):
    one = roll_out(model)
    rows, chosen = all_renoised(config(), [one]), [6, 1]
    part, same = renoised(config(), [one], chosen), torch.tensor([6, 1, 14, 9])
    assert part.sample_index.tolist() == [6, 1, 6, 1]
    assert torch.equal(part.time, rows.time[same])
    assert torch.equal(part.noisy, rows.noisy[same])


# --- levels ---------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None, derandomize=True)
@given(num_steps=st.integers(1, 12), count=st.integers(1, 30), key=st.text(max_size=5))
def test_levels_of_the_schedule_are_drawn_evenly(num_steps: int, count: int, key: str) -> None:
    sigmas = (*(1 - step / num_steps for step in range(num_steps)), 0.0)
    levels = noise_levels("schedule", count, sigmas, key)
    assert len(levels) == count
    drawn = [levels.count(sigma) for sigma in sigmas[:-1]]
    assert sum(drawn) == count
    assert max(drawn) - min(drawn) <= 1


def test_samples_draw_levels_of_their_own_and_all_levels_are_drawn():
    sigmas = (1.0, 0.75, 0.5, 0.25, 0.0)
    drawn = [tuple(noise_levels("schedule", 2, sigmas, f"{key}")) for key in range(100)]
    assert {level for levels in drawn for level in levels} == set(sigmas[:-1])
    assert len(set(drawn)) > 5


def test_random_levels_fill_the_unit_interval():
    levels = torch.tensor([noise_levels("random", 4, (1.0, 0.0), f"{key}") for key in range(500)])
    assert levels.min() > 0
    assert levels.max() <= 1
    counts = torch.histc(levels, 10, 0, 1)
    assert counts.min() > 150
    assert counts.max() < 250


# --- velocities -----------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_the_velocity_is_the_conditional_one_whatever_guidance_sampled(model, guidance_scale):
    rows = all_renoised(config(), [roll_out(model, guidance_scale=guidance_scale)])
    conditioning = rows.samples.conditioning.select(rows.sample_index)
    expected = model.velocity(rows.noisy, rows.time, conditioning)
    assert torch.equal(velocity_of(model, rows), expected)


def test_velocities_in_slices_are_those_of_all_rows_and_other_rows_stay_empty(model):
    rows = all_renoised(config(), [roll_out(model)])
    slices = list(torch.arange(1, 16).split(4))
    found = velocities_in(policy(model).model, rows, slices)
    torch.testing.assert_close(found[1:], velocity_of(model, rows)[1:])
    assert not found[0].any()


@pytest.mark.parametrize("layout", ["packed", "video"])
def test_the_velocity_error_does_not_depend_on_the_layout(layout):
    image, other = renoised_rows("image"), renoised_rows(layout)
    model = SmoothModel()
    left, right = (velocity_error(model, rows) for rows in (image, other))  # type: ignore[arg-type]
    assert left.shape == (6,)
    torch.testing.assert_close(left, right)
