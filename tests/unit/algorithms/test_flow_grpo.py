"""The Flow-GRPO loss against public implementations, and its rows, anchor and gradients."""

from __future__ import annotations

from dataclasses import replace
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
)
from golden_transition import INPUTS, REFERENCE, fixed, reference_rows
from torch import Tensor

from unirl.algorithms.anchors import RatioRows
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.algorithms.making import no_reward
from unirl.algorithms.transitions import TransitionRows
from unirl.core.types import ScoredRollout
from unirl.models.lora import adapter_parameters
from unirl.models.tiny import TinyModel


def algorithm(**overrides: Any) -> FlowGRPO:
    config = run_config({f"algorithm.{k}": v for k, v in overrides.items()}).algorithm
    return FlowGRPO(config, no_reward)


def on_rollout(rows: TransitionRows) -> RatioRows:
    """Ratios are taken to the engine's own log-probs."""
    return RatioRows(rows, rows.rollout_log_prob)


# --- numbers of public implementations ------------------------------------------------------------


def test_loss_and_metrics_equal_the_public_implementations():
    grpo = algorithm(clip_range=REFERENCE["case"]["clip_range"])
    losses = grpo.loss(fixed(INPUTS.v), on_rollout(reference_rows()))
    ratio = losses.details["log_ratio"].exp()
    torch.testing.assert_close(ratio, torch.tensor(REFERENCE["ratio"]), rtol=2e-7, atol=2e-7)
    assert float(losses.loss.mean()) == pytest.approx(REFERENCE["policy_loss"], rel=1e-6)
    metrics, expected = grpo.metrics(losses.details), REFERENCE["metrics"]
    for name in ("ratio_mean", "ratio_min", "ratio_max"):
        assert metrics[name] == pytest.approx(expected[name], rel=2e-7)
    assert metrics["clip_fraction"] == expected["clip_fraction"]
    assert metrics["clip_fraction_high"] == expected["clipfrac_gt_one"]
    assert metrics["clip_fraction_low"] == expected["clipfrac_lt_one"]
    assert metrics["approx_kl"] == pytest.approx(expected["approx_kl"], rel=2e-3)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-0.3, -0.15, -0.05, 0.0, 0.05, 0.15, 0.3])
def test_the_clip_removes_the_gradient_only_where_the_step_was_already_made(advantage, log_ratio):
    velocity = INPUTS.v.clone().requires_grad_()
    grpo = algorithm(clip_range=0.1, clip_range_high=0.2)
    rows = replace(reference_rows(), advantages=torch.full((2,), advantage))
    new = grpo.loss(fixed(velocity), on_rollout(rows)).details["log_ratio"] + rows.rollout_log_prob
    losses = grpo.loss(fixed(velocity), RatioRows(rows, new - log_ratio))
    (gradient,) = torch.autograd.grad(losses.loss.sum(), velocity)
    is_clipped = (log_ratio > 0.2 and advantage > 0) or (log_ratio < -0.1 and advantage < 0)
    assert bool(gradient.any()) != is_clipped


# --- rows -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> TinyModel:
    model = tiny_model()
    randomize_adapter(model)
    return model


def roll_out(model: TinyModel, valid: Tensor | None = None, **request: Any) -> ScoredRollout:
    rollout = sample(model, rollout_request(**request), forward_batch_size=4)
    return scored(rollout, valid=valid)


def test_rows_go_step_by_step_through_all_samples(model):
    one = roll_out(model, sde_steps=(1, 3))
    rows = algorithm().rows([one])
    assert len(rows) == 16
    assert rows.sample_index.tolist() == [*range(8), *range(8)]
    sigmas = one.request.sigmas
    torch.testing.assert_close(rows.sigma, torch.tensor([sigmas[1]] * 8 + [sigmas[3]] * 8))
    torch.testing.assert_close(rows.sigma_next, torch.tensor([sigmas[2]] * 8 + [sigmas[4]] * 8))
    for row in range(16):
        sample_id, step = row % 8, row // 8
        assert torch.equal(rows.latents[row], one.trajectory.latents[sample_id, step])
        assert torch.equal(rows.next_latents[row], one.trajectory.next_latents[sample_id, step])
        assert rows.rollout_log_prob[row] == one.trajectory.log_probs[sample_id, step]
        assert rows.advantages[row] == one.advantages[sample_id]


def test_a_window_of_rollouts_counts_its_samples_on_and_keeps_their_own_steps(model):
    first, second = roll_out(model, sde_steps=(0, 1)), roll_out(model, sde_steps=(2,), key="other")
    rows = algorithm().rows([first, second])
    assert rows.sample_index.tolist() == [*range(8), *range(8), *range(8, 16)]
    assert set(rows.sigma[16:].tolist()) == {torch.tensor(second.request.sigmas[2]).item()}
    apart = algorithm().rows([second])
    together = rows.select(torch.arange(16, 24))
    grpo = algorithm()
    losses = [grpo.loss(policy(model), on_rollout(rows)).loss for rows in (together, apart)]
    assert torch.equal(*losses)


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_a_shared_start_is_asked_once_with_the_same_loss_and_gradients(
    model, monkeypatch: pytest.MonkeyPatch, guidance_scale: float
) -> None:
    request = rollout_request(sde_steps=(1, 2), guidance_scale=guidance_scale)
    request = replace(request, initial_noise_keys=("same",) * 8)
    one = scored(sample(model, request))
    rows = algorithm().rows([one, one])
    states = [0] * 4 + [4] * 4 + list(range(8, 16))
    assert rows.state.tolist() == states + [16 + state for state in states]
    asked: list[int] = []
    velocity = TinyModel.velocity

    def counting(self: TinyModel, latents: Tensor, *inputs: Any) -> Tensor:
        asked.append(len(latents) if guidance_scale == 1 else len(latents) // 2)
        return velocity(self, latents, *inputs)

    monkeypatch.setattr(TinyModel, "velocity", counting)
    results = []
    for state in (rows.state, torch.arange(len(rows))):
        losses = algorithm().loss(policy(model), on_rollout(replace(rows, state=state)))
        parameters = list(adapter_parameters(model.network).values())
        results.append((losses.loss, torch.autograd.grad(losses.loss.sum(), parameters)))
    assert asked == [2 * (2 + 8), 2 * 16]
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


def test_samples_of_one_start_part_at_the_first_step_that_is_stochastic_for_one_of_them(model):
    request = rollout_request(num_prompts=1)
    steps = ((1, 2), (1, 3), (2, 3), (2, 3))
    request = replace(request, sde_steps=steps, initial_noise_keys=("same",) * 4)
    rows = algorithm().rows([scored(sample(model, request))])
    assert rows.state.tolist() == [0, 0, 2, 2, 4, 5, 6, 7]
    assert torch.equal(rows.latents, rows.latents[rows.state])


# --- the anchor -----------------------------------------------------------------------------------


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("old_log_prob", ["replay", "rollout"])
@pytest.mark.parametrize("kernel", ["flow", "dance", "flash", "cps", "ddim"])
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_before_the_first_update_the_ratio_is_exactly_one(
    compute_dtype, old_log_prob, kernel, guidance_scale
):
    model = tiny_model(compute_dtype=compute_dtype)
    randomize_adapter(model)
    one = roll_out(model, kernel=kernel, guidance_scale=guidance_scale)
    grpo = algorithm(old_log_prob=old_log_prob)
    rows = grpo.rows([one])
    slices = torch.arange(len(rows)).split(4)
    rows, metrics = grpo.anchor(policy(model), rows, slices)
    log_ratios = [
        grpo.loss(policy(model), rows.select(part)).details["log_ratio"] for part in slices
    ]
    assert not torch.cat(log_ratios).any()
    if old_log_prob == "replay":
        assert metrics["rollout_replay_log_prob_diff_max"] == 0


def test_replay_makes_the_ratio_one_in_any_micro_batch_size(model):
    grpo = algorithm()
    rows = grpo.rows([roll_out(model)])
    slices = torch.arange(len(rows)).split(3)
    rows, metrics = grpo.anchor(policy(model), rows, slices)
    for part in slices:
        assert not grpo.loss(policy(model), rows.select(part)).details["log_ratio"].any()
    assert metrics["rollout_replay_log_prob_diff_max"] < 1e-5


def test_the_anchor_tells_when_the_engine_sampled_with_other_weights():
    model = tiny_model()
    grpo = algorithm()
    rows = grpo.rows([roll_out(model)])
    randomize_adapter(model)
    _, metrics = grpo.anchor(policy(model), rows, [torch.arange(len(rows))])
    assert metrics["rollout_replay_log_prob_diff_mean"] > 1e-3


def test_the_anchor_keeps_no_graph(model):
    grpo = algorithm()
    rows, _ = grpo.anchor(policy(model), grpo.rows([roll_out(model)]), [torch.arange(16)])
    assert not rows.old_log_prob.requires_grad


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_step_raises_the_log_prob_of_what_was_better_and_lowers_the_rest(sign):
    model = tiny_model()
    randomize_adapter(model)
    grpo = algorithm(clip_range=10.0)
    rows = grpo.rows([roll_out(model)])
    rows = on_rollout(replace(rows, advantages=torch.full_like(rows.advantages, sign)))
    optimizer = torch.optim.SGD(adapter_parameters(model.network).values(), lr=1e-2)
    grpo.loss(policy(model), rows).loss.mean().backward()
    optimizer.step()
    change = grpo.loss(policy(model), rows).details["log_ratio"].mean()
    assert float(change) * sign > 1e-6


def test_the_reference_is_the_model_without_its_adapter():
    model = tiny_model()
    one = roll_out(model)
    grpo = algorithm(kl_coefficient=1.0)
    rows = on_rollout(grpo.rows([one]))
    assert not grpo.loss(policy(model), rows).details["kl_reference"].any()
    randomize_adapter(model)
    assert grpo.loss(policy(model), rows).details["kl_reference"].gt(1e-4).all()


def test_the_kl_term_alone_has_a_gradient_that_pulls_back_to_the_reference():
    model = tiny_model()
    randomize_adapter(model)
    one = roll_out(model)
    grpo = algorithm(kl_coefficient=1.0)
    rows = on_rollout(grpo.rows([replace(one, advantages=torch.zeros(8))]))
    parameters = list(adapter_parameters(model.network).values())
    before = grpo.loss(policy(model), rows)
    before.loss.mean().backward()
    assert any(p.grad is not None and p.grad.any() for p in parameters)
    torch.optim.SGD(parameters, lr=1e-3).step()
    after = grpo.loss(policy(model), rows).details["kl_reference"].mean()
    assert float(after) < float(before.details["kl_reference"].mean())


def test_looking_at_the_reference_leaves_the_adapter_trainable_and_its_gradient_unchanged():
    def gradients(kl_coefficient: float) -> list[Tensor]:
        model = tiny_model()
        randomize_adapter(model)
        grpo = algorithm(kl_coefficient=kl_coefficient)
        grpo.loss(policy(model), on_rollout(grpo.rows([roll_out(model)]))).loss.mean().backward()
        parameters = adapter_parameters(model.network).values()
        assert all(p.requires_grad for p in parameters)
        return [p.grad for p in parameters if p.grad is not None]

    tiny_weight, none = gradients(1e-12), gradients(0.0)
    assert len(tiny_weight) == len(none) > 0
    for left, right in zip(tiny_weight, none, strict=True):
        torch.testing.assert_close(left, right)


def test_details_are_detached(model):
    grpo = algorithm(kl_coefficient=0.5)
    losses = grpo.loss(policy(model), on_rollout(grpo.rows([roll_out(model)])))
    assert losses.loss.requires_grad
    assert not any(value.requires_grad for value in losses.details.values())


def test_loss_is_policy_loss_plus_weighted_kl(model):
    grpo = algorithm(kl_coefficient=0.5)
    details = grpo.loss(policy(model), on_rollout(grpo.rows([roll_out(model)]))).details
    torch.testing.assert_close(
        details["loss"], details["policy_loss"] + 0.5 * details["kl_reference"]
    )
