"""The Flow-GRPO loss against public implementations, and its rows, anchor and gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from builders import randomize_adapter, rollout_request, run_config, sample, scored, tiny_model
from golden_inputs import golden, golden_tensors
from torch import Tensor, nn

from unirl.algorithms.flow_grpo import FlowGRPO, TransitionRows
from unirl.core.types import Conditioning, ScoredRollout
from unirl.models.lora import adapter_parameters
from unirl.models.tiny import TinyModel
from unirl.samplers.kernels import make_kernel

REFERENCE = golden("losses.json")
INPUTS = golden_tensors()[REFERENCE["case"]["shape"]]
SIGMAS = tuple(golden("kernels.json")["sigmas"][REFERENCE["case"]["schedule"]])
STEP = REFERENCE["case"]["step"]


def algorithm(**overrides: Any) -> FlowGRPO:
    return FlowGRPO(run_config({f"algorithm.{k}": v for k, v in overrides.items()}).algorithm)


@dataclass(frozen=True)
class Nothing(Conditioning):
    rows: Tensor


class FixedVelocity:
    """A model that answers every question with one tensor."""

    def __init__(self, velocity: Tensor) -> None:
        self.network = nn.Identity()
        self._velocity = velocity

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return self._velocity


def reference_rows() -> TransitionRows:
    sigma, sigma_next = torch.full((2,), SIGMAS[STEP]), torch.full((2,), SIGMAS[STEP + 1])
    next_latents = INPUTS.next_latents(sigma[0], sigma_next[0])
    kernel = make_kernel("flow", REFERENCE["case"]["noise_level"], SIGMAS)
    old = kernel.transition(INPUTS.x, INPUTS.v_old, sigma, sigma_next).log_prob(next_latents)
    return TransitionRows(
        latents=INPUTS.x,
        next_latents=next_latents,
        sigma=sigma,
        sigma_next=sigma_next,
        rollout_log_prob=old,
        old_log_prob=old,
        advantages=torch.tensor(REFERENCE["case"]["advantages"]),
        sample_index=torch.arange(2),
        state=torch.arange(2),
        conditioning=Nothing(torch.zeros(2, 1)),
        negative_conditioning=None,
        guidance_scale=1.0,
        kernel=kernel,
    )


# --- numbers of public implementations ------------------------------------------------------------


def test_loss_and_metrics_equal_the_public_implementations():
    grpo = algorithm(clip_range=REFERENCE["case"]["clip_range"])
    losses = grpo.loss(FixedVelocity(INPUTS.v), reference_rows())  # type: ignore[arg-type]
    torch.testing.assert_close(
        losses.details["ratio"], torch.tensor(REFERENCE["ratio"]), rtol=2e-7, atol=2e-7
    )
    assert float(losses.loss.mean()) == pytest.approx(REFERENCE["policy_loss"], rel=1e-6)
    metrics, expected = grpo.metrics(losses.details), REFERENCE["metrics"]
    for name in ("ratio_mean", "ratio_min", "ratio_max"):
        assert metrics[name] == pytest.approx(expected[name], rel=2e-7)
    assert metrics["clip_fraction"] == expected["clip_fraction"]
    assert metrics["clip_fraction_high"] == expected["clipfrac_gt_one"]
    assert metrics["clip_fraction_low"] == expected["clipfrac_lt_one"]
    assert metrics["approx_kl"] == pytest.approx(expected["approx_kl"], rel=2e-3)


def test_the_exact_kl_is_the_published_one_without_its_missing_step_size():
    rows = reference_rows()
    policy, reference = (
        rows.kernel.transition(rows.latents, velocity, rows.sigma, rows.sigma_next)
        for velocity in (INPUTS.v, INPUTS.v_ref)
    )
    step_size = SIGMAS[STEP] - SIGMAS[STEP + 1]
    published = float(policy.kl(reference).mean()) * step_size
    assert published == pytest.approx(REFERENCE["kl_loss_without_dt"], rel=1e-4)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-0.3, -0.05, 0.0, 0.05, 0.3])
def test_the_clip_removes_the_gradient_only_where_the_step_was_already_made(advantage, log_ratio):
    velocity = INPUTS.v.clone().requires_grad_()
    grpo, rows = algorithm(clip_range=0.1, clip_range_high=0.2), reference_rows()
    model = FixedVelocity(velocity)
    new = grpo.loss(model, rows).details["log_ratio"] + rows.old_log_prob  # type: ignore[arg-type]
    rows = replace(rows, old_log_prob=new - log_ratio, advantages=torch.full((2,), advantage))
    losses = grpo.loss(model, rows)  # type: ignore[arg-type]
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
    assert torch.equal(grpo.loss(model, together).loss, grpo.loss(model, apart).loss)


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
        losses = algorithm().loss(model, replace(rows, state=state))
        parameters = list(adapter_parameters(model.network).values())
        results.append((losses.loss, torch.autograd.grad(losses.loss.sum(), parameters)))
    assert asked == [2 * (2 + 8), 2 * 16]
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


# --- the anchor -----------------------------------------------------------------------------------


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("old_log_prob", ["replay", "rollout"])
@pytest.mark.parametrize("kernel", ["flow", "dance", "cps"])
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
    rows, metrics = grpo.anchor(model, rows, slices)
    log_ratios = [grpo.loss(model, rows.select(part)).details["log_ratio"] for part in slices]
    assert not torch.cat(log_ratios).any()
    if old_log_prob == "replay":
        assert metrics["rollout_replay_log_prob_diff_max"] == 0


def test_replay_makes_the_ratio_one_in_any_micro_batch_size(model):
    grpo = algorithm()
    rows = grpo.rows([roll_out(model)])
    slices = torch.arange(len(rows)).split(3)
    rows, metrics = grpo.anchor(model, rows, slices)
    for part in slices:
        assert not grpo.loss(model, rows.select(part)).details["log_ratio"].any()
    assert metrics["rollout_replay_log_prob_diff_max"] < 1e-5


def test_the_anchor_tells_when_the_engine_sampled_with_other_weights():
    model = tiny_model()
    grpo = algorithm()
    rows = grpo.rows([roll_out(model)])
    randomize_adapter(model)
    _, metrics = grpo.anchor(model, rows, [torch.arange(len(rows))])
    assert metrics["rollout_replay_log_prob_diff_mean"] > 1e-3


def test_the_anchor_keeps_no_graph(model):
    grpo = algorithm()
    rows, _ = grpo.anchor(model, grpo.rows([roll_out(model)]), [torch.arange(16)])
    assert not rows.old_log_prob.requires_grad


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_step_raises_the_log_prob_of_what_was_better_and_lowers_the_rest(sign):
    model = tiny_model()
    randomize_adapter(model)
    grpo = algorithm(clip_range=10.0)
    rows = grpo.rows([roll_out(model)])
    rows = replace(rows, advantages=torch.full_like(rows.advantages, sign))
    optimizer = torch.optim.SGD(adapter_parameters(model.network).values(), lr=1e-2)
    grpo.loss(model, rows).loss.mean().backward()
    optimizer.step()
    change = grpo.loss(model, rows).details["log_ratio"].mean()
    assert float(change) * sign > 1e-6


def test_the_reference_is_the_model_without_its_adapter():
    model = tiny_model()
    one = roll_out(model)
    grpo = algorithm(kl_coefficient=1.0)
    rows = grpo.rows([one])
    assert not grpo.loss(model, rows).details["kl_reference"].any()
    randomize_adapter(model)
    assert grpo.loss(model, rows).details["kl_reference"].gt(1e-4).all()


def test_the_kl_term_alone_has_a_gradient_that_pulls_back_to_the_reference():
    model = tiny_model()
    randomize_adapter(model)
    one = roll_out(model)
    grpo = algorithm(kl_coefficient=1.0)
    rows = grpo.rows([replace(one, advantages=torch.zeros(8))])
    parameters = list(adapter_parameters(model.network).values())
    before = grpo.loss(model, rows)
    before.loss.mean().backward()
    assert any(p.grad is not None and p.grad.any() for p in parameters)
    torch.optim.SGD(parameters, lr=1e-3).step()
    after = grpo.loss(model, rows).details["kl_reference"].mean()
    assert float(after) < float(before.details["kl_reference"].mean())


def test_looking_at_the_reference_leaves_the_adapter_trainable_and_its_gradient_unchanged():
    def gradients(kl_coefficient: float) -> list[Tensor]:
        model = tiny_model()
        randomize_adapter(model)
        grpo = algorithm(kl_coefficient=kl_coefficient)
        grpo.loss(model, grpo.rows([roll_out(model)])).loss.mean().backward()
        parameters = adapter_parameters(model.network).values()
        assert all(p.requires_grad for p in parameters)
        return [p.grad for p in parameters if p.grad is not None]

    tiny_weight, none = gradients(1e-12), gradients(0.0)
    assert len(tiny_weight) == len(none) > 0
    for left, right in zip(tiny_weight, none, strict=True):
        torch.testing.assert_close(left, right)


def test_details_are_detached(model):
    grpo = algorithm(kl_coefficient=0.5)
    losses = grpo.loss(model, grpo.rows([roll_out(model)]))
    assert losses.loss.requires_grad
    assert not any(value.requires_grad for value in losses.details.values())


def test_loss_is_policy_loss_plus_weighted_kl(model):
    grpo = algorithm(kl_coefficient=0.5)
    details = grpo.loss(model, grpo.rows([roll_out(model)])).details
    torch.testing.assert_close(
        details["loss"], details["policy_loss"] + 0.5 * details["kl_reference"]
    )
