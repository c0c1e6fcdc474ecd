"""What every loss on recorded transitions has to be, whatever its formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

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
from golden_transition import drawn_rows, fixed
from torch import Tensor

from unirl.algorithms.base import Algorithm, Policy
from unirl.algorithms.making import make_algorithm
from unirl.algorithms.transitions import TransitionRows
from unirl.core.types import Conditioning, RolloutRequest, SamplingParams, ScoredRollout
from unirl.models.base import DiffusionModel
from unirl.models.lora import adapter_parameters
from unirl.models.tiny import TinyConditioning, TinyModel
from unirl.samplers.guidance import classifier_free

KERNELS = ("flow", "dance", "flash", "cps", "ddim")
# Clip ranges so wide that nothing is left out, where a test looks at gradients.
WIDE = {"algorithm.clip_range": 10.0}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "flow_grpo": WIDE,
    "grpo_guard": WIDE,
    "flow_dppo": {"algorithm.kl_mask_threshold": 1e9},
    "flash_grpo": WIDE,
    "tempflow_grpo": WIDE,
}

pytestmark = pytest.mark.parametrize("name", ALGORITHMS)


def algorithm(name: str, **overrides: Any) -> Algorithm[Any, Any]:
    keys = {f"algorithm.{key}": value for key, value in overrides.items()}
    config = run_config({**ALGORITHMS[name], **keys, "algorithm.path": name}).algorithm
    return make_algorithm(config)


def anchored(made: Algorithm[Any, Any], old: Policy, rows: TransitionRows) -> Any:
    return made.anchor(old, rows, [torch.arange(len(rows))])[0]


def roll_out(model: TinyModel, **request: Any) -> ScoredRollout:
    return scored(sample(model, rollout_request(**request)))


def branching(**request: Any) -> RolloutRequest:
    """2 prompts x 4 samples, each with one stochastic step; two by two they share a start."""
    made = rollout_request(**request)
    return replace(
        made,
        sde_steps=((1,), (1,), (3,), (3,)) * 2,
        initial_noise_keys=tuple(f"start/{b // 2}" for b in range(8)),
    )


def trained_model(**settings: Any) -> TinyModel:
    model = tiny_model(**settings)
    randomize_adapter(model)
    return model


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_gradient_is_that_of_finite_differences(name, kernel):
    rows, old = drawn_rows((2, 3), kernel)
    made = algorithm(name)
    rows = anchored(made, fixed(old), rows)
    velocity = (old + 0.05 * torch.cos(torch.arange(old.numel())).view_as(old)).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: made.loss(fixed(v), rows).loss, (velocity,))


class InDouble:
    """A tiny model whose network computes in float64."""

    def __init__(self) -> None:
        self.model = trained_model()
        self.network = self.model.network.double()

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, TinyConditioning)
        return self.network(latents.double(), sigma.double(), conditioning.token_ids)

    def guided_velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        sampling: SamplingParams,
    ) -> Tensor:
        scale = sampling.guidance_scale
        return classifier_free(self.velocity, latents, sigma, conditioning, negative, scale)

    def policy(self) -> Policy:
        return policy(cast(DiffusionModel, self))


@pytest.mark.parametrize("kl_form", ["nats", "velocity_mse"])
def test_through_both_guidance_branches_the_gradient_is_that_of_finite_differences(name, kl_form):
    one = roll_out(trained_model(), guidance_scale=3.0)
    model = InDouble()
    made = algorithm(name, kl_coefficient=0.1, kl_form=kl_form)
    rows = anchored(made, model.policy(), in_double(made.rows([one])))
    parameters = adapter_parameters(model.network)
    for parameter in parameters.values():  # away from where the ratio is 1
        parameter.data = parameter.data.double() * 1.05
    parameter = next(p for p in parameters.values() if p.shape[0] == 2)

    def loss() -> Tensor:
        return made.loss(model.policy(), rows).loss.mean()

    (gradient,) = torch.autograd.grad(loss(), parameter)
    for place in ((0, 0), (1, 3)):
        assert float(gradient[place]) == pytest.approx(
            finite_difference(loss, parameter, place), rel=1e-5, abs=1e-12
        )


def in_double(rows: TransitionRows) -> TransitionRows:
    names = ("latents", "next_latents", "sigma", "sigma_next", "rollout_log_prob", "advantages")
    return replace(rows, **{name: getattr(rows, name).double() for name in names})


def finite_difference(loss: Any, parameter: Tensor, place: tuple[int, ...]) -> float:
    values = []
    with torch.no_grad():
        for sign in (1, -1):
            parameter[place] += sign * 1e-5
            values.append(float(loss()))
            parameter[place] -= sign * 1e-5
    return (values[0] - values[1]) / 2e-5


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_step_raises_the_log_prob_of_what_was_better_and_lowers_the_rest(name, sign):
    model = trained_model()
    made = algorithm(name)
    rows = made.rows([roll_out(model)])
    rows = anchored(made, policy(model), replace(rows, advantages=torch.full((16,), sign)))
    optimizer = torch.optim.SGD(adapter_parameters(model.network).values(), lr=1e-3)
    made.loss(policy(model), rows).loss.mean().backward()
    optimizer.step()
    change = made.loss(policy(model), rows).details["log_ratio"].mean()
    assert float(change) * sign > 1e-7


def test_groups_of_equal_rewards_give_exactly_no_gradient(name):
    model = trained_model()
    made = algorithm(name)
    rows = made.rows([scored(sample(model, rollout_request()), rewards=torch.full((8,), 0.3))])
    losses = made.loss(policy(model), anchored(made, policy(model), rows))
    losses.loss.sum().backward()
    assert losses.loss.tolist() == [0.0] * 16
    for parameter in adapter_parameters(model.network).values():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_an_update_on_equal_rewards_is_skipped(name):
    model = trained_model()
    one = scored(sample(model, rollout_request()), rewards=torch.full((8,), 0.3))
    stack = train_stack(model, {**ALGORITHMS[name], "algorithm.path": name})
    (stats,) = stack.update([one])
    assert stats.skipped == "zero gradient: equal rewards in every group, or the aim is reached"
    assert stack.weight_version == 0


# --- the ratio before the first update ------------------------------------------------------------


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_before_the_first_update_the_ratio_is_exactly_one(
    name, compute_dtype, kernel, guidance_scale
):
    model = trained_model(compute_dtype=compute_dtype)
    made = algorithm(name)
    request = branching(kernel=kernel, guidance_scale=guidance_scale)
    rows = made.rows([scored(sample(model, request))])
    slices = torch.arange(len(rows)).split(3)
    rows, metrics = made.anchor(policy(model), rows, slices)
    log_ratios = log_ratios_of(made, model, rows, slices)
    assert log_ratios.tolist() == [0.0] * 8
    assert metrics["rollout_replay_log_prob_diff_max"] < (
        1e-5 if compute_dtype == torch.float32 else 1e-2
    )
    randomize_adapter(model, seed=3)
    assert log_ratios_of(made, model, rows, slices).abs().min() > 0


def log_ratios_of(
    made: Algorithm[Any, Any], model: TinyModel, rows: Any, slices: Sequence[Tensor]
) -> Tensor:
    with torch.no_grad():
        losses = [made.loss(policy(model), rows.select(index)) for index in slices]
    return torch.cat([one.details["log_ratio"] for one in losses])


def test_the_anchor_tells_when_the_engine_sampled_with_other_weights(name):
    model = tiny_model()
    made = algorithm(name)
    rows = made.rows([roll_out(model)])
    randomize_adapter(model)
    _, metrics = made.anchor(policy(model), rows, [torch.arange(len(rows))])
    assert metrics["rollout_replay_log_prob_diff_mean"] > 1e-3


# --- rows -----------------------------------------------------------------------------------------


def test_samples_keep_steps_of_their_own(name):
    model = trained_model()
    one = scored(sample(model, branching()))
    rows = algorithm(name).rows([one])
    sigmas = torch.tensor(one.request.sigmas)
    assert rows.step.tolist() == [1, 1, 3, 3, 1, 1, 3, 3]
    assert torch.equal(rows.sigma, sigmas[rows.step])
    assert torch.equal(rows.sigma_next, sigmas[rows.step + 1])
    # The two samples of a start are at the same place before their one stochastic step.
    assert rows.state.tolist() == [0, 0, 2, 2, 4, 4, 6, 6]
    assert torch.equal(rows.latents, rows.latents[rows.state])


@pytest.mark.parametrize("kernel", KERNELS)
def test_latents_of_any_number_of_dimensions_give_the_same_loss(name, kernel):
    losses = []
    for shape in ((2, 3, 4), (24,), (2, 3, 2, 2)):
        rows, old = drawn_rows(shape, kernel, torch.float32)
        made = algorithm(name)
        rows = anchored(made, fixed(old), rows)
        losses.append(made.loss(fixed(old * 1.05), rows).loss)
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(losses[2], losses[0])


def test_rows_are_selected_with_their_anchor(name):
    rows, old = drawn_rows((3,), dtype=torch.float32)
    made = algorithm(name)
    rows, index = anchored(made, fixed(old), rows), torch.tensor([1, 3])
    velocity = old * 1.1
    some = made.loss(fixed(velocity[index]), rows.select(index))
    torch.testing.assert_close(some.loss, made.loss(fixed(velocity), rows).loss[index])
    assert rows.select(index).sample_index.tolist() == [1, 3]


def test_details_are_detached_and_metrics_are_their_means(name):
    model = trained_model()
    made = algorithm(name, kl_coefficient=0.5)
    rows = anchored(made, policy(model), made.rows([roll_out(model)]))
    losses = made.loss(policy(model), rows)
    assert losses.loss.requires_grad
    assert not any(value.requires_grad for value in losses.details.values())
    metrics = made.metrics(losses.details)
    assert metrics["loss"] == float(losses.loss.detach().mean())
    expected = metrics["policy_loss"] + 0.5 * metrics["kl_reference"]
    assert metrics["loss"] == pytest.approx(expected, abs=1e-6)
    assert metrics["ratio_mean"] == 1
    assert metrics["clip_fraction"] == 0


# --- the reference --------------------------------------------------------------------------------


def test_the_kl_term_alone_has_a_gradient_once_the_adapter_has_moved(name):
    """A KL computed without gradients, or to the policy itself, would have none."""
    model = trained_model()
    made = algorithm(name, kl_coefficient=1.0)
    rows = made.rows([replace(roll_out(model), advantages=torch.zeros(8))])
    losses = made.loss(policy(model), anchored(made, policy(model), rows))
    losses.loss.mean().backward()
    assert losses.details["policy_loss"].tolist() == [0.0] * 16
    assert losses.details["kl_reference"].min() > 1e-4
    gradients = [p.grad for p in adapter_parameters(model.network).values()]
    assert all(gradient is not None and gradient.any() for gradient in gradients)


def test_without_a_kl_nobody_asks_the_reference(name):
    model = trained_model()
    made = algorithm(name)
    without = Policy(model, {}, progress=0.0)
    rows = anchored(made, without, made.rows([roll_out(model)]))
    assert "kl_reference" not in made.loss(without, rows).details
    assert not made.shadows()


def test_the_adapter_is_active_again_after_the_reference_was_asked(name):
    model = trained_model()
    made = algorithm(name, kl_coefficient=1e-12)
    rows = anchored(made, policy(model), made.rows([roll_out(model)]))
    for _ in range(2):
        assert made.loss(policy(model), rows).details["log_ratio"].tolist() == [0.0] * 16
