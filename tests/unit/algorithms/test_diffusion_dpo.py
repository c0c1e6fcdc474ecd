"""Diffusion-DPO: which pairs are formed, the loss on them, and windows without any."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import (
    randomize_adapter,
    rollout_request,
    run_config,
    same_bits,
    sample,
    scored,
    tiny_model,
    train_stack,
    weights,
)
from renoised_inputs import (
    SmoothModel,
    assert_gradient_is_that_of,
    moved,
    policy_of,
    renoised_rows,
)
from torch import Tensor

from unirl.algorithms.diffusion_dpo import (
    AnchoredPairs,
    DiffusionDPO,
    PairRows,
    best_and_worst,
    error_gap,
)
from unirl.algorithms.making import make_algorithm
from unirl.core.types import ScoredRollout
from unirl.models.tiny import TinyModel

KEYS = {"algorithm.path": "diffusion_dpo", "sampling.eta": 0.0}
REWARDS = [0.1, 0.9, 0.4, 0.2, 5.0, 7.0, 6.0, 9.0]
"""Of two groups of four."""


def algorithm(**keys: Any) -> DiffusionDPO:
    changed = {f"algorithm.{name}": value for name, value in keys.items()}
    made = make_algorithm(run_config({**KEYS, **changed}).algorithm)
    assert isinstance(made, DiffusionDPO)
    return made


@pytest.fixture(scope="module")
def model() -> TinyModel:
    model = tiny_model()
    randomize_adapter(model)
    return model


def roll_out(
    model: TinyModel, rewards: list[float] | None = None, key: str = "test", **request: Any
) -> ScoredRollout:
    rollout = sample(model, rollout_request(sde_steps=(), key=key, **request))
    return scored(rollout, None if rewards is None else torch.tensor(rewards))


# --- pairs ----------------------------------------------------------------------------------------


def pairs_in(*scored: ScoredRollout) -> list[list[int]]:
    best, worst, is_pair = best_and_worst(scored)
    return torch.stack([best, worst], dim=1)[is_pair].tolist()


def test_a_pair_is_the_best_and_the_worst_of_a_group(model):
    assert pairs_in(roll_out(model, REWARDS)) == [[1, 0], [7, 4]]


def test_groups_of_equal_rewards_give_no_pair_and_equals_give_the_first(model):
    assert pairs_in(roll_out(model, [0.5, 0.5, 0.5, 0.5, 1.0, 0.0, 1.0, 0.0])) == [[4, 5]]


def test_samples_that_are_not_trained_form_no_pair(model):
    trained = torch.tensor([True, False, True, True, False, False, False, False])
    assert pairs_in(replace(roll_out(model, REWARDS), trained=trained)) == [[2, 0]]


def test_a_window_of_rollouts_counts_its_samples_on(model):
    flat = [0.0] * 4
    first = roll_out(model, [*flat, 3.0, 2.0, 1.0, 4.0])
    second = roll_out(model, [0.0, 1.0, 2.0, 3.0, *flat], key="other")
    assert pairs_in(first, second) == [[7, 6], [11, 8]]


def test_a_rank_pairs_its_own_samples_by_the_rewards_of_all(model):
    """Samples 4..7 of 8 lie here."""
    one = roll_out(model, num_prompts=1)
    rewards = torch.tensor([9.0, 0.0, 0.0, 0.0, 0.1, 0.3, 0.2, 0.0])
    here = replace(
        one,
        places=torch.arange(4, 8),
        rewards=replace(one.rewards, total=rewards),
        trained=torch.ones(8, dtype=torch.bool),
    )
    assert pairs_in(here) == [[1, 3]]


def test_both_of_a_pair_have_the_same_noise_and_level_and_pairs_have_their_own(model):
    one = roll_out(model, REWARDS)
    rows = algorithm(timesteps_per_sample=3).rows([one])
    assert rows.sample_index.tolist() == [1, 7] * 3
    assert rows.rejected.sample_index.tolist() == [0, 4] * 3
    assert torch.equal(rows.preferred.time, rows.rejected.time)
    assert torch.equal(rows.preferred.noise, rows.rejected.noise)
    assert len(torch.unique(rows.preferred.noise.flatten(1), dim=0)) == 6
    part = rows.select(torch.tensor([3]))
    clean = one.trajectory.final_latents
    assert torch.equal(part.preferred.clean[0], clean[7])
    assert torch.equal(part.rejected.clean[0], clean[4])


def test_rows_without_a_preference_are_marked(model):
    rows = algorithm().rows([roll_out(model, [0.5, 0.5, 0.5, 0.5, 1.0, 0.0, 1.0, 0.0])])
    assert rows.sample_index.tolist() == [-1, 4, -1, 4]


# --- the loss -------------------------------------------------------------------------------------


def pairs_of(layout: str = "image") -> PairRows:
    """6 pairs of 3 samples: each with the next one."""
    rows = renoised_rows(layout)
    rejected = replace(rows, sample_index=(rows.sample_index + 1) % 3)
    return PairRows(rows, rejected, rows.sample_index)


@torch.no_grad()
def anchored(
    dpo: DiffusionDPO, model: SmoothModel, pairs: PairRows, by: float = 0.1
) -> AnchoredPairs:
    """With a reference whose weights are `by` larger."""
    policy = policy_of(model, base=moved(model, by), ema=moved(model, by))
    return dpo.anchor(policy, pairs, list(torch.arange(len(pairs)).split(4)))[0]


def test_at_the_reference_the_loss_is_log_2():
    model = SmoothModel()
    losses = algorithm().loss(policy_of(model), anchored(algorithm(), model, pairs_of(), 0.0))
    torch.testing.assert_close(losses.loss, torch.full((6,), math.log(2), dtype=torch.float64))
    assert algorithm().metrics(losses.details)["preference_accuracy"] == 0.5  # a tie


def test_the_loss_is_the_papers():
    model, beta = SmoothModel(), 3.0
    rows = anchored(algorithm(), model, pairs_of())

    def errors() -> Tensor:
        """[2, R] of preferred and rejected."""
        both = []
        for part in (rows.pairs.preferred, rows.pairs.rejected):
            samples = part.samples.conditioning.select(part.sample_index)
            velocity = model.velocity(part.noisy, part.time, samples)
            both.append(((velocity - part.noise + part.clean) ** 2).flatten(1).mean(dim=1))
        return torch.stack(both)

    with torch.no_grad():
        ours = errors()
        with moved(model, 0.1)():
            theirs = errors()
    preferred, rejected = ours - theirs
    expected = -torch.nn.functional.logsigmoid(-beta / 2 * (preferred - rejected))
    losses = algorithm(preference_beta=beta).loss(policy_of(model), rows)
    torch.testing.assert_close(losses.loss, expected)
    metrics = algorithm().metrics(losses.details)
    assert metrics["preference_accuracy"] == pytest.approx(
        float((preferred < rejected).double().mean())
    )
    assert metrics["preference_margin"] == pytest.approx(
        float((beta / 2 * (rejected - preferred)).mean())
    )


def test_the_gradient_is_that_of_the_loss():
    model, dpo = SmoothModel(), algorithm(preference_beta=5.0)
    rows = anchored(dpo, model, pairs_of())

    def loss() -> Tensor:
        return dpo.loss(policy_of(model), rows).loss.sum()

    gradients = torch.autograd.grad(loss(), model.parameters)
    assert_gradient_is_that_of(model, loss, list(gradients))


@pytest.mark.parametrize("layout", ["packed", "video"])
def test_the_loss_does_not_depend_on_the_layout(layout):
    model, dpo = SmoothModel(), algorithm()
    losses = [
        dpo.loss(policy_of(model), anchored(dpo, model, pairs_of(name))).loss
        for name in ("image", layout)
    ]
    torch.testing.assert_close(losses[0], losses[1])


def test_the_anchor_asks_the_reference_that_is_named():
    model = SmoothModel()
    policy = policy_of(model, base=moved(model, 0.1), ema=moved(model, 0.2))
    gaps = {}
    with torch.no_grad():
        for name in ("base", "ema"):
            rows, _ = algorithm(reference=name).anchor(policy, pairs_of(), [torch.arange(6)])
            gaps[name] = rows.reference_gap
        for name, by in (("base", 0.1), ("ema", 0.2)):
            with moved(model, by)():
                torch.testing.assert_close(gaps[name], error_gap(model, pairs_of()))  # type: ignore[arg-type]
    assert not torch.allclose(gaps["base"], gaps["ema"])
    assert algorithm().shadows() == {}
    (rule,) = algorithm(reference="ema", ema_decay=0.7).shadows().values()
    assert rule.decay(3) == 0.7


def test_training_prefers_the_preferred(model):
    tiny = tiny_model()
    stack = train_stack(tiny, {**KEYS, "stack.optimizer.learning_rate": 3e-3})
    one = roll_out(tiny)
    stats = [stack.update([one])[0].metrics for _ in range(5)]
    assert stats[0]["loss"] == pytest.approx(math.log(2))
    assert stats[-1]["loss"] < stats[0]["loss"]
    assert stats[-1]["preference_accuracy"] == 1


# --- windows without pairs ------------------------------------------------------------------------


def test_a_window_without_any_pair_is_skipped_and_changes_nothing():
    tiny = tiny_model()
    randomize_adapter(tiny)
    stack = train_stack(
        tiny, {**KEYS, "stack.num_updates_per_batch": 2, "algorithm.reference": "ema"}
    )
    before, shadows = weights(tiny), stack.weights.shadow_tensors()
    (stats,) = stack.update([roll_out(tiny, [0.5] * 8)])
    assert stats.skipped is not None
    assert stats.metrics["grad_norm"] == 0
    assert stack.weight_version == 0
    assert same_bits(before, weights(tiny))
    assert same_bits(shadows, stack.weights.shadow_tensors())


def test_only_the_groups_with_a_preference_are_trained_on(model):
    def gradient_norm(rewards: list[float], **request: Any) -> float:
        tiny = tiny_model()
        randomize_adapter(tiny)
        return (
            train_stack(tiny, KEYS)
            .update([roll_out(tiny, rewards, **request)])[0]
            .metrics["grad_norm"]
        )

    rewards = [0.1, 0.9, 0.4, 0.2]
    both = gradient_norm([*rewards, 0.5, 0.5, 0.5, 0.5])
    assert both == pytest.approx(gradient_norm(rewards, num_prompts=1), rel=1e-5)
