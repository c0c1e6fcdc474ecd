"""Group-relative advantages against public implementations and at their edges."""

from __future__ import annotations

import pytest
import torch
from golden_inputs import golden
from torch import Tensor

from unirl.algorithms.advantage import group_relative, reward_advantages
from unirl.core.types import Rewards

REFERENCE = golden("advantages.json")
REWARDS = torch.tensor(REFERENCE["rewards"], dtype=torch.float32)


def advantages(
    rewards: Tensor,
    valid: Tensor | None = None,
    group_size: int = 4,
    use_global_std: bool = False,
) -> Tensor:
    valid = torch.ones(len(rewards), dtype=torch.bool) if valid is None else valid
    return group_relative(rewards, valid, group_size, use_global_std)


@pytest.mark.parametrize("scope", ["group", "global"])
@pytest.mark.parametrize("source", ["flow_grpo", "flow_factory"])
def test_they_equal_public_implementations_up_to_the_constant_in_the_divisor(source, scope):
    expected = torch.tensor(REFERENCE[f"{source}_{scope}"], dtype=torch.float32)
    found = advantages(REWARDS, use_global_std=scope == "global")
    torch.testing.assert_close(
        found, expected, rtol=5e-4 if source == "flow_grpo" else 1e-5, atol=0
    )


@pytest.mark.parametrize("reward", [0.25, 0.1, 0.7, 1e6 + 0.3, -3e-9])
@pytest.mark.parametrize("use_global_std", [False, True])
def test_groups_of_equal_rewards_give_exactly_zero(reward, use_global_std):
    """The mean of 7 equal numbers is rounded, and 1 / eps would make much of the difference."""
    rewards = torch.cat([torch.full((7,), reward), torch.arange(7.0)])
    found = advantages(rewards, group_size=7, use_global_std=use_global_std)
    assert found[:7].tolist() == [0.0] * 7
    assert found[7] < found[10] == 0 < found[13]


def test_equal_rewards_everywhere_give_exactly_zero():
    assert not advantages(torch.full((16,), 0.3), group_size=8, use_global_std=True).any()


@pytest.mark.parametrize("use_global_std", [False, True])
def test_one_sample_per_group_gives_zero(use_global_std):
    found = advantages(torch.tensor([0.1, 5.0, -2.0]), group_size=1, use_global_std=use_global_std)
    assert found.tolist() == [0, 0, 0]


@pytest.mark.parametrize("use_global_std", [False, True])
@pytest.mark.parametrize("failed", [float("nan"), float("inf"), -1e30])
def test_samples_that_are_not_valid_take_no_part_and_get_zero(use_global_std, failed):
    rewards, valid = REWARDS.clone(), torch.ones(24, dtype=torch.bool)
    rewards[4:8], valid[4:8] = failed, False
    found = advantages(rewards, valid, use_global_std=use_global_std)
    others = torch.cat([REWARDS[:4], REWARDS[8:]])
    expected = advantages(others, use_global_std=use_global_std)
    assert found[4:8].tolist() == [0, 0, 0, 0]
    torch.testing.assert_close(torch.cat([found[:4], found[8:]]), expected)


def test_a_single_failed_sample_is_left_out_of_its_groups_mean_and_std():
    rewards = torch.tensor([1.0, float("nan"), 3.0, 5.0])
    valid = torch.tensor([True, False, True, True])
    found = advantages(rewards, valid)
    expected = advantages(torch.tensor([1.0, 3.0, 5.0]), group_size=3)
    torch.testing.assert_close(found[valid], expected)
    assert found[1] == 0


@pytest.mark.parametrize("use_global_std", [False, True])
def test_nothing_valid_gives_zero_without_nan(use_global_std):
    nothing = torch.zeros(4, dtype=torch.bool)
    found = advantages(torch.full((4,), float("nan")), nothing, use_global_std=use_global_std)
    assert found.tolist() == [0, 0, 0, 0]


def test_the_scale_of_rewards_does_not_matter_and_their_order_is_kept():
    small, large = advantages(REWARDS * 1e-3 + 7e-3), advantages(REWARDS * 1e3)
    torch.testing.assert_close(small, large, rtol=1e-3, atol=1e-3)
    for group in REWARDS.view(-1, 4):
        assert advantages(group).argsort().tolist() == group.argsort().tolist()


def test_each_group_has_mean_zero_and_std_one():
    grouped = advantages(REWARDS).view(-1, 4)
    torch.testing.assert_close(grouped.mean(dim=1), torch.zeros(6), atol=1e-6, rtol=0)
    stds = grouped.std(dim=1, correction=0)
    torch.testing.assert_close(stds, torch.tensor([1.0, 1, 0, 1, 1, 1]), atol=1e-5, rtol=0)


# --- several scorers ------------------------------------------------------------------------------

WEIGHTS = {"narrow": 1.0, "wide": 0.5}
SECOND = torch.tensor(REFERENCE["rewards_q"], dtype=torch.float32)


def combined(
    first: Tensor,
    second: Tensor,
    *,
    per_component: bool,
    use_global_std: bool = False,
    clip_max: float = 5.0,
) -> Tensor:
    components = {"narrow": first, "wide": second}
    total = first * WEIGHTS["narrow"] + second * WEIGHTS["wide"]
    return reward_advantages(
        Rewards(total, components, torch.ones(len(first), dtype=torch.bool)),
        WEIGHTS,
        group_size=4,
        per_component=per_component,
        use_global_std=use_global_std,
        clip_max=clip_max,
    )


@pytest.mark.parametrize("per_component", [False, True])
def test_advantages_are_clipped_to_both_sides(per_component):
    found = combined(REWARDS, SECOND, per_component=per_component, clip_max=1.0)
    unclipped = combined(REWARDS, SECOND, per_component=per_component, clip_max=99.0)
    assert (float(found.max()), float(found.min())) == (1.0, -1.0)
    torch.testing.assert_close(found, unclipped.clamp(-1, 1))


def test_without_per_component_the_weighted_sum_is_compared():
    found = combined(REWARDS, SECOND, per_component=False, use_global_std=True)
    torch.testing.assert_close(found, advantages(REWARDS + 0.5 * SECOND, use_global_std=True))
    torch.testing.assert_close(found, torch.tensor(REFERENCE["sum"]), rtol=1e-4, atol=1e-5)


def test_per_component_no_scorer_counts_more_for_a_wider_spread():
    found = combined(REWARDS, SECOND, per_component=True)
    torch.testing.assert_close(found, advantages(REWARDS) + 0.5 * advantages(SECOND))
    scaled = combined(REWARDS * 100, SECOND / 100, per_component=True)
    torch.testing.assert_close(scaled, found, rtol=1e-4, atol=1e-4)
    # The reference divides by the batch's std once more.
    normalised = found / found.std(correction=0)
    torch.testing.assert_close(normalised, torch.tensor(REFERENCE["gdpo"]), rtol=1e-4, atol=1e-4)
