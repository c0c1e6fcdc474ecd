"""Advantage Weighted Matching: the surrogate on velocity errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import (
    policy,
    randomize_adapter,
    rollout_request,
    run_config,
    sample,
    scored,
    tiny_model,
    train_stack,
)
from renoised_inputs import (
    SmoothModel,
    assert_gradient_is_that_of,
    moved,
    policy_of,
    renoised_rows,
)
from torch import Tensor

from unirl.algorithms.awm import AdvantageWeightedMatching, AWMRows
from unirl.algorithms.making import make_algorithm
from unirl.algorithms.renoised import RenoisedRows, velocity_error
from unirl.models.tiny import TinyModel

KEYS = {"algorithm.path": "awm", "sampling.eta": 0.0}


def algorithm(**keys: Any) -> AdvantageWeightedMatching:
    changed = {f"algorithm.{name}": value for name, value in keys.items()}
    made = make_algorithm(run_config({**KEYS, **changed}).algorithm)
    assert isinstance(made, AdvantageWeightedMatching)
    return made


@torch.no_grad()
def anchored(awm: AdvantageWeightedMatching, model: SmoothModel, rows: RenoisedRows) -> AWMRows:
    """With a reference some way off; the weights before the update are the present ones."""
    policy = policy_of(model, base=moved(model, 0.2))
    return awm.anchor(policy, rows, [torch.arange(len(rows))])[0]


def error_of(model: SmoothModel, rows: AWMRows) -> Tensor:
    return velocity_error(model, rows.renoised)  # type: ignore[arg-type]


def test_before_the_update_the_gradient_is_the_advantage_times_that_of_the_error():
    model, awm = SmoothModel(), algorithm()
    rows = anchored(awm, model, renoised_rows())
    losses = awm.loss(policy_of(model), rows)
    assert not losses.details["log_ratio"].any()
    gradients = torch.autograd.grad(losses.loss.sum(), model.parameters)
    weighted = (rows.renoised.advantages * error_of(model, rows)).sum()
    expected = torch.autograd.grad(weighted, model.parameters)
    for left, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("power", [1.0, 0.25])
def test_the_ratio_is_that_of_the_error_to_its_power(power):
    model, awm = SmoothModel(), algorithm(error_power=power)
    rows = anchored(awm, model, renoised_rows())
    before = error_of(model, rows).detach()
    with moved(model, 0.05)():
        log_ratio = awm.loss(policy_of(model), rows).details["log_ratio"]
        expected = before**power - error_of(model, rows).detach() ** power
    torch.testing.assert_close(log_ratio, expected)
    assert float(log_ratio.abs().min()) > 1e-6


def test_the_ratio_is_clipped_where_the_step_was_already_made():
    model = SmoothModel()
    rows = anchored(algorithm(clip_range=1e-3), model, renoised_rows())
    with moved(model, 0.05)():
        losses = algorithm(clip_range=1e-3).loss(policy_of(model), rows)
        free = algorithm(clip_range=10.0).loss(policy_of(model), rows)
    ratio, advantages = losses.details["log_ratio"].exp(), rows.renoised.advantages
    made = ((ratio > 1.001) & (advantages > 0)) | ((ratio < 0.999) & (advantages < 0))
    clipped = (losses.loss - free.loss).abs() > 1e-9
    assert torch.equal(clipped, made)
    assert 0 < int(made.sum()) < len(made)
    metrics = algorithm().metrics(losses.details)
    outside = ((ratio > 1.001) | (ratio < 0.999)).double().mean()
    assert metrics["clip_fraction"] == pytest.approx(float(outside))


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_the_gradient_is_that_of_the_loss(power):
    model = SmoothModel()
    awm = algorithm(clip_range=0.5, error_power=power, kl_coefficient=0.2)
    rows = anchored(awm, model, renoised_rows())

    def loss() -> Tensor:
        return awm.loss(policy_of(model), rows).loss.sum()

    with moved(model, 1e-3)():
        gradients = torch.autograd.grad(loss(), model.parameters)
        assert_gradient_is_that_of(model, loss, list(gradients))


@pytest.mark.parametrize("layout", ["packed", "video"])
def test_the_loss_does_not_depend_on_the_layout(layout):
    model, awm = SmoothModel(), algorithm(kl_coefficient=0.3, clip_range=0.5)
    losses = []
    for name in ("image", layout):
        rows = anchored(awm, model, renoised_rows(name))
        with moved(model, 0.01)():
            losses.append(awm.loss(policy_of(model), rows).loss)
    torch.testing.assert_close(losses[0], losses[1])


def test_the_penalty_is_the_distance_to_the_velocity_without_adapter():
    model = tiny_model()
    one = scored(sample(model, rollout_request(sde_steps=())))
    awm = algorithm(kl_coefficient=0.5)
    slices = [torch.arange(16)]
    with torch.no_grad():
        rows, _ = awm.anchor(policy(model), awm.rows([one]), slices)
        assert not awm.loss(policy(model), rows).details["velocity_deviation"].any()
        randomize_adapter(model)
        details = awm.loss(policy(model), rows).details
    assert details["velocity_deviation"].gt(1e-4).all()
    torch.testing.assert_close(
        details["loss"], details["policy_loss"] + 0.5 * details["velocity_deviation"]
    )


def test_the_first_ratio_is_exactly_one_in_any_micro_batch_and_later_ones_are_not():
    model = tiny_model()
    randomize_adapter(model)
    stack = train_stack(
        model, {**KEYS, "stack.num_updates_per_batch": 2, "stack.micro_batch_size": 3}
    )
    first, second = stack.update([scored(sample(model, rollout_request(sde_steps=())))])
    assert first.metrics["log_ratio_abs_max"] == 0
    assert second.metrics["log_ratio_abs_max"] > 1e-5


def test_good_samples_become_likelier_with_training():
    model = tiny_model()
    assert isinstance(model, TinyModel)
    stack = train_stack(
        model,
        {**KEYS, "stack.optimizer.learning_rate": 3e-3, "algorithm.clip_range": 0.2},
    )
    one = scored(sample(model, rollout_request(sde_steps=())))
    awm = algorithm(clip_range=0.2)
    with torch.no_grad():
        rows, _ = awm.anchor(policy(model), awm.rows([one]), [torch.arange(16)])
    for _ in range(5):
        stack.update([one])
    log_ratio = awm.loss(policy(model), rows).details["log_ratio"]
    advantages = rows.renoised.advantages
    assert float((log_ratio * advantages).mean()) > 1e-5
