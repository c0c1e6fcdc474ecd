"""An engine that did something else than it was asked is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import rollout_request, sample, tiny_model

from unirl.core.errors import RolloutError
from unirl.core.types import Rollout
from unirl.rollout.echo import require_as_asked

REQUEST = rollout_request(sde_steps=(1, 3))


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    return sample(tiny_model(), REQUEST)


def test_what_was_asked_passes(rollout: Rollout) -> None:
    require_as_asked(REQUEST, rollout)
    assert rollout.sigmas == REQUEST.sigmas


def test_levels_that_differ_by_rounding_pass_and_a_second_shift_does_not(rollout: Rollout) -> None:
    rounded = tuple(torch.tensor(REQUEST.sigmas).tolist())
    require_as_asked(REQUEST, replace(rollout, sigmas=rounded))
    shifted = tuple(3 * s / (1 + 2 * s) for s in REQUEST.sigmas)
    with pytest.raises(RolloutError, match=r"level 1 is 0\.923077 instead of 0\.8"):
        require_as_asked(REQUEST, replace(rollout, sigmas=shifted))


def test_another_number_of_steps_is_told(rollout: Rollout) -> None:
    with pytest.raises(RolloutError, match="asked for 5 steps, but made 4"):
        require_as_asked(REQUEST, replace(rollout, sigmas=rollout.sigmas[:-1]))


def test_a_window_of_the_engines_own_is_told(rollout: Rollout) -> None:
    steps = rollout.trajectory.steps.clone()
    steps[5] = torch.tensor([2, 3])
    other = replace(rollout, trajectory=replace(rollout.trajectory, steps=steps))
    with pytest.raises(RolloutError, match=r"steps \(1, 3\) in sample 5, but made \(2, 3\)"):
        require_as_asked(REQUEST, other)


def test_missing_samples_are_told(rollout: Rollout) -> None:
    few = replace(rollout.trajectory, steps=rollout.trajectory.steps[:3])
    with pytest.raises(RolloutError, match="asked for 8 samples, but made 3"):
        require_as_asked(REQUEST, replace(rollout, trajectory=few))
