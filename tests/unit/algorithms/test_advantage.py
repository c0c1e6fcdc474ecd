"""Group-relative advantages against public implementations and at their edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from builders import run_config
from golden_inputs import golden
from torch import Tensor

from unirl.algorithms.advantage import AdvantageRule, group_relative, trimmed
from unirl.core.types import Rewards

REFERENCE = golden("advantages.json")
REWARDS = torch.tensor(REFERENCE["rewards"], dtype=torch.float32)


def advantages(
    rewards: Tensor,
    valid: Tensor | None = None,
    group_size: int = 4,
    use_global_std: bool = False,
    **divisor: Any,
) -> Tensor:
    valid = torch.ones(len(rewards), dtype=torch.bool) if valid is None else valid
    return group_relative(rewards, valid, group_size, use_global_std, **divisor)


@pytest.mark.parametrize("scope", ["group", "global"])
@pytest.mark.parametrize(
    ("source", "ddof", "epsilon"),
    [
        ("flow_grpo", 0, 1e-4),
        ("flow_factory", 0, 0.0),  # its floor of 1e-6 is never reached
        ("verl_omni", 1, 1e-4),
        ("unirl", 1, 1e-8),
    ],
)
def test_they_equal_public_implementations(source, ddof, epsilon, scope):
    expected = torch.tensor(REFERENCE[f"{source}_{scope}"], dtype=torch.float32)
    found = advantages(REWARDS, use_global_std=scope == "global", ddof=ddof, epsilon=epsilon)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("ddof", [0, 1])
def test_ddof_and_epsilon_are_those_of_numpy(ddof):
    groups = REWARDS.double().numpy().reshape(-1, 4)
    centred = groups - groups.mean(axis=1, keepdims=True)
    for use_global_std in (False, True):
        axis = None if use_global_std else 1
        std = groups.std(axis=axis, ddof=ddof, keepdims=True)
        found = advantages(REWARDS, use_global_std=use_global_std, ddof=ddof, epsilon=0.01)
        np.testing.assert_allclose(found, (centred / (std + 0.01)).ravel(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("use_global_std", [False, True])
def test_a_sample_std_of_one_valid_sample_gives_zero_without_nan(use_global_std):
    valid = torch.tensor([True, False, False, False])
    found = advantages(torch.arange(4.0), valid, use_global_std=use_global_std, ddof=1)
    assert found.tolist() == [0, 0, 0, 0]


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


def rule(**overrides: Any) -> AdvantageRule:
    """Of groups of 4 with two scorers."""
    scorers = {name: {"path": name, "weight": weight} for name, weight in WEIGHTS.items()}
    return AdvantageRule.of(run_config({"reward": {"scorers": scorers}, **overrides}))


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
    return rule(
        adv_per_component=per_component,
        adv_use_global_std=use_global_std,
        **{"algorithm.adv_clip_max": clip_max},
    ).advantages(Rewards(total, components, torch.ones(len(first), dtype=torch.bool)))


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


# --- which samples are compared, and which are trained -------------------------------------------


def alone(total: Tensor, valid: Tensor | None = None) -> Rewards:
    """Rewards of one scorer."""
    valid = torch.ones(len(total), dtype=torch.bool) if valid is None else valid
    return Rewards(total, {"only": total}, valid)


def test_samples_of_one_start_are_compared_with_each_other_alone():
    by_start = rule(**{"adv_group": "start", "sampling.samples_per_start": 2})
    found = by_start.advantages(alone(REWARDS))
    torch.testing.assert_close(found, advantages(REWARDS, group_size=2))
    by_prompt = rule(**{"sampling.samples_per_start": 2})
    torch.testing.assert_close(by_prompt.advantages(alone(REWARDS)), advantages(REWARDS))


def test_a_group_that_starts_from_one_noise_is_one_start():
    one_start = rule(**{"adv_group": "start", "sampling.init_same_noise": True})
    torch.testing.assert_close(one_start.advantages(alone(REWARDS)), advantages(REWARDS))


def test_trimmed_rewards_are_those_of_numpy_clipped_to_quantiles():
    found = trimmed(REWARDS, torch.ones(24, dtype=torch.bool), 0.1)
    low, high = np.quantile(REWARDS.numpy(), [0.1, 0.9])
    np.testing.assert_allclose(found, REWARDS.numpy().clip(low, high), rtol=1e-6)
    assert float(found.max()) < float(REWARDS.max())


def test_trimming_looks_at_valid_samples_alone_and_comes_before_the_comparison():
    rewards, valid = REWARDS.clone(), torch.ones(24, dtype=torch.bool)
    rewards[4:8], valid[4:8] = float("nan"), False
    found = rule(adv_trim=0.2).advantages(alone(rewards, valid))
    kept = rewards[valid].clamp(*rewards[valid].quantile(torch.tensor([0.2, 0.8])))
    torch.testing.assert_close(found[valid], advantages(kept))
    assert found[4:8].tolist() == [0, 0, 0, 0]


def test_nothing_valid_is_not_trimmed():
    nothing = torch.zeros(4, dtype=torch.bool)
    assert not rule(adv_trim=0.2).advantages(alone(torch.full((4,), float("nan")), nothing)).any()


@pytest.mark.parametrize(("best_of", "num_worst"), [(1, 0), (2, 1), (3, 1), (4, 2)])
def test_best_of_trains_on_the_best_and_the_worst_of_each_group(best_of, num_worst):
    trained = rule(adv_best_of=best_of).trained(alone(REWARDS)).view(-1, 4)
    for group, chosen in zip(REWARDS.view(-1, 4), trained, strict=True):
        order = group.argsort(stable=True).tolist()
        num_best = best_of - num_worst
        assert set(torch.nonzero(chosen).flatten().tolist()) == {
            *order[:num_worst],
            *order[4 - num_best :],
        }


def test_best_of_compares_with_the_whole_group():
    found = rule(adv_best_of=2).advantages(alone(REWARDS))
    torch.testing.assert_close(found, advantages(REWARDS))


@pytest.mark.parametrize("failed", [float("nan"), float("inf"), -1e30])
def test_best_of_counts_valid_samples_alone(failed):
    rewards = torch.tensor([3.0, failed, 1.0, 2.0, failed, failed, 5.0, failed])
    valid = torch.tensor([True, False, True, True, False, False, True, False])
    trained = rule(adv_best_of=2).trained(alone(rewards, valid))
    assert torch.nonzero(trained).flatten().tolist() == [0, 2, 6]


def test_all_valid_samples_are_trained_by_default():
    valid = torch.tensor([True, False, True, True])
    assert torch.equal(rule().trained(alone(torch.arange(4.0), valid)), valid)


def test_without_scorers_nothing_is_better_than_anything() -> None:
    """As in distillation, where no reward is needed."""
    config = run_config({"adv_per_component": True, "reward": None})
    zeros = torch.zeros(4)
    rewards = Rewards(zeros, {}, torch.ones(4, dtype=torch.bool))
    assert torch.equal(AdvantageRule.of(config).advantages(rewards), zeros)
