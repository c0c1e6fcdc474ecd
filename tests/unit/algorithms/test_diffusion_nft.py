"""DiffusionNFT: its authors' numbers, its algebra, and the shadow that samples."""

from __future__ import annotations

from contextlib import nullcontext
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
from golden_inputs import golden, golden_tensors
from renoised_inputs import (
    SmoothModel,
    Words,
    assert_gradient_is_that_of,
    moved,
    policy_of,
    renoised_rows,
)
from torch import Tensor

from unirl.algorithms.diffusion_nft import OLD, DiffusionNFT, NFTRows
from unirl.algorithms.making import make_algorithm
from unirl.algorithms.renoised import CleanSamples, RenoisedRows, velocity_of
from unirl.core.errors import ModelError, TrainingError
from unirl.core.types import Conditioning, ScoredRollout
from unirl.models.lora import adapter_parameters
from unirl.models.tiny import TinyModel
from unirl.train.stack import TrainStack
from unirl.weight_sync.payload import Probe

CASES = golden("diffusion_nft.json")["cases"]
KEYS = {"algorithm.path": "diffusion_nft", "sampling.eta": 0.0}


def algorithm(**keys: Any) -> DiffusionNFT:
    changed = {f"algorithm.{name}": value for name, value in keys.items()}
    made = make_algorithm(run_config({**KEYS, **changed}).algorithm)
    assert isinstance(made, DiffusionNFT)
    return made


class FixedVelocity:
    """Answers every question with one tensor."""

    def __init__(self, velocity: Tensor) -> None:
        self._velocity = velocity

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return self._velocity


def golden_rows(case: dict[str, Any], with_reference: bool = False) -> NFTRows:
    inputs = golden_tensors()[case["shape"]]
    samples = CleanSamples(inputs.x0, torch.tensor(case["advantages"]), Words(torch.zeros(2)))
    rows = RenoisedRows(samples, torch.arange(2), torch.tensor(case["t"]), inputs.z)
    return NFTRows(rows, inputs.v_old, inputs.v_ref if with_reference else None)


# --- the authors' numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_the_authors(case):
    velocity = golden_tensors()[case["shape"]].v.clone().requires_grad_()
    nft = algorithm(mix_beta=case["beta"], adv_clip_max=case["adv_clip_max"])
    losses = nft.loss(policy_of(FixedVelocity(velocity)), golden_rows(case))
    for name in ("positive_loss", "negative_loss"):
        torch.testing.assert_close(
            losses.details[name], torch.tensor(case[name]), rtol=2e-6, atol=0
        )
    assert float(losses.loss.detach().mean()) == pytest.approx(case["policy_loss"], rel=1e-6)
    assert nft.metrics(losses.details)["old_deviation"] == pytest.approx(
        case["old_deviate"], rel=1e-4
    )
    (gradient,) = torch.autograd.grad(losses.loss.mean(), velocity)
    assert float(gradient.norm()) == pytest.approx(case["grad_v_norm"], rel=1e-5)
    torch.testing.assert_close(
        gradient.flatten()[:4], torch.tensor(case["grad_v_first4"]), rtol=1e-4, atol=1e-7
    )


def test_the_penalty_is_the_authors_distance_of_velocities():
    case = CASES[0]
    nft = algorithm(kl_coefficient=case["kl_beta"])
    model = FixedVelocity(golden_tensors()[case["shape"]].v)
    metrics = nft.metrics(nft.loss(policy_of(model), golden_rows(case, True)).details)
    assert metrics["velocity_deviation"] == pytest.approx(case["kl_div_loss"], rel=1e-5)
    expected = metrics["policy_loss"] + case["kl_beta"] * metrics["velocity_deviation"]
    assert metrics["loss"] == pytest.approx(expected, rel=1e-6)


# --- algebra --------------------------------------------------------------------------------------


def at_old(
    model: SmoothModel, rows: RenoisedRows, advantages: list[float] | None = None
) -> NFTRows:
    if advantages is not None:
        samples = replace(rows.samples, advantages=torch.tensor(advantages, dtype=torch.float64))
        rows = replace(rows, samples=samples)
    return NFTRows(rows, velocity_of(model, rows).detach(), None)  # type: ignore[arg-type]


@torch.no_grad()
def anchored(nft: DiffusionNFT, model: SmoothModel, rows: RenoisedRows) -> NFTRows:
    """With an old policy and a reference some way off."""
    policy = policy_of(model, old=moved(model, 0.1), base=moved(model, 0.2))
    return nft.anchor(policy, rows, [torch.arange(len(rows))])[0]


def error_of(rows: NFTRows) -> Tensor:
    """x0 error of the old policy, [R, elements]."""
    renoised = rows.renoised
    time = renoised.time.view(-1, 1, 1, 1)
    return (renoised.noisy - time * rows.old_velocity - renoised.clean).flatten(1)


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_at_the_old_policy_the_loss_is_its_error_by_its_size_whatever_the_advantage(beta):
    model = SmoothModel()
    rows = at_old(model, renoised_rows())
    loss = algorithm(mix_beta=beta).loss(policy_of(model), rows).loss
    error = error_of(rows)
    expected = 5.0 / beta * (error**2).mean(dim=1) / error.abs().mean(dim=1)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("adaptive_weight", [True, False])
def test_advantage_zero_has_no_gradient_at_the_old_policy_and_pulls_back_elsewhere(adaptive_weight):
    model = SmoothModel()
    rows = at_old(model, renoised_rows(), [0.0, 0.0, 0.0])
    nft = algorithm(adaptive_weight=adaptive_weight)
    loss = nft.loss(policy_of(model), rows).loss.sum()
    gradients = torch.autograd.grad(loss, model.parameters)
    assert max(float(g.abs().max()) for g in gradients) < 1e-12
    with moved(model, 0.01)():
        away = nft.loss(policy_of(model), rows)
        gradients = torch.autograd.grad(away.loss.sum(), model.parameters)
    assert max(float(g.abs().max()) for g in gradients) > 1e-4
    if not adaptive_weight:
        assert float(away.loss.detach().sum()) > float(loss.detach())


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("advantage", [4.0, -2.0])
def test_the_best_velocity_lies_from_the_old_one_as_far_as_the_advantage_says(beta, advantage):
    """Without the weight the loss is quadratic: its minimum is v_old + (2 r - 1) e / (beta t)."""
    model = SmoothModel()
    rows = at_old(model, renoised_rows(), [advantage] * 3)
    time = rows.renoised.time.view(-1, 1, 1, 1)
    error = error_of(rows).view_as(rows.old_velocity)
    best = (rows.old_velocity + advantage / 5 * error / (beta * time)).requires_grad_()
    nft = algorithm(adaptive_weight=False, mix_beta=beta)
    loss = nft.loss(policy_of(FixedVelocity(best)), rows).loss.sum()
    (gradient,) = torch.autograd.grad(loss, best)
    assert float(gradient.abs().max()) < 1e-12
    farther = (best + 0.1).detach()
    assert nft.loss(policy_of(FixedVelocity(farther)), rows).loss.sum() > loss


def test_a_good_sample_is_learned_and_a_bad_one_unlearned():
    """To first order; advantages beyond adv_clip_max count as it."""
    model = SmoothModel()

    def change(advantage: float) -> float:
        rows = at_old(model, renoised_rows(), [advantage] * 3)
        loss = algorithm().loss(policy_of(model), rows).loss.mean()
        gradients = torch.autograd.grad(loss, model.parameters)
        error = (velocity_of(model, rows.renoised) - rows.renoised.target) ** 2  # type: ignore[arg-type]
        slopes = torch.autograd.grad(error.mean(), model.parameters)
        return -float(sum((g * s).sum() for g, s in zip(gradients, slopes, strict=True)))

    assert change(1.0) < 0 < change(-1.0)
    assert change(10.0) == pytest.approx(change(5.0))
    assert change(2.0) == pytest.approx(2 * change(1.0))


@pytest.mark.parametrize("layout", ["packed", "video"])
def test_the_loss_does_not_depend_on_the_layout(layout):
    model = SmoothModel()
    losses = []
    for name in ("image", layout):
        rows = anchored(algorithm(kl_coefficient=0.3), model, renoised_rows(name))
        losses.append(algorithm(kl_coefficient=0.3).loss(policy_of(model), rows).loss)
    torch.testing.assert_close(losses[0], losses[1])


def test_the_gradient_is_that_of_the_loss_with_weights_held_fixed():
    model = SmoothModel()
    nft = algorithm(kl_coefficient=0.2, mix_beta=0.5)
    rows = anchored(nft, model, renoised_rows())
    losses = nft.loss(policy_of(model), rows)
    gradients = torch.autograd.grad(losses.loss.sum(), model.parameters)
    good = ((rows.renoised.advantages / 5).clamp(-1, 1) + 1) / 2

    def errors() -> tuple[Tensor, Tensor, Tensor]:
        velocity = velocity_of(model, rows.renoised)  # type: ignore[arg-type]
        time, step = rows.renoised.time.view(-1, 1, 1, 1), 0.5 * (velocity - rows.old_velocity)
        predicted = [rows.renoised.noisy - time * (rows.old_velocity + s * step) for s in (1, -1)]
        positive, negative = ((p - rows.renoised.clean).flatten(1) for p in predicted)
        return positive, negative, (velocity - rows.reference_velocity).flatten(1)

    weights = [error.abs().mean(dim=1).detach() for error in errors()[:2]]

    def loss() -> Tensor:
        positive, negative, deviation = errors()
        plus, minus = (
            (error**2).mean(dim=1) / weight
            for error, weight in zip((positive, negative), weights, strict=True)
        )
        penalty = 0.2 * (deviation**2).mean(dim=1)
        return (10 * (good * plus + (1 - good) * minus) + penalty).sum()

    assert float(losses.loss.detach().sum()) == pytest.approx(float(loss().detach()))
    assert_gradient_is_that_of(model, loss, list(gradients))


def test_a_perfect_prediction_does_not_divide_by_zero():
    model = FixedVelocity(renoised_rows().target.requires_grad_())
    rows = NFTRows(renoised_rows(), renoised_rows().target, None)
    loss = algorithm().loss(policy_of(model), rows).loss
    assert float(loss.detach().abs().max()) < 1e-12


def test_a_loss_that_is_not_finite_names_the_sample():
    rows = renoised_rows()
    velocity = rows.target.clone()
    velocity[4, 0, 0, 0] = torch.inf
    with pytest.raises(TrainingError, match="the loss of sample 1 at noise level"):
        algorithm().loss(policy_of(FixedVelocity(velocity)), NFTRows(rows, rows.target, None))


# --- the anchor and the shadow --------------------------------------------------------------------


def test_the_anchor_asks_old_and_reference_policies_and_leaves_the_weights():
    model = SmoothModel()
    before = [p.detach().clone() for p in model.parameters]
    rows = renoised_rows()
    policy = policy_of(model, old=moved(model, 0.1), base=moved(model, 0.2))
    slices = [torch.arange(3), torch.arange(3, 6)]
    with torch.no_grad():
        anchored, _ = algorithm(kl_coefficient=1e-4).anchor(policy, rows, slices)
        without, _ = algorithm().anchor(policy_of(model, old=nullcontext), rows, slices)
        for by, found in ((0.1, anchored.old_velocity), (0.2, anchored.reference_velocity)):
            with moved(model, by)():
                torch.testing.assert_close(found, velocity_of(model, rows))  # type: ignore[arg-type]
    assert without.reference_velocity is None
    torch.testing.assert_close(before, [p.detach() for p in model.parameters])


@pytest.mark.parametrize(
    ("keys", "steps_to_decay"),
    [
        ((0, 0.001, 0.5), {0: 0.0, 1: 0.001, 100: 0.1, 500: 0.5, 9999: 0.5}),
        ((75, 0.0075, 0.999), {1: 0.0, 75: 0.0, 76: 0.0075, 175: 0.75, 999: 0.999}),
        ((0, 1.0, 0.0), {1: 0.0, 100: 0.0}),
    ],
)
def test_the_old_policy_follows_by_the_papers_schedules(keys, steps_to_decay):
    start, rate, largest = keys
    nft = algorithm(old_decay_start=start, old_decay_rate=rate, old_decay_max=largest)
    decay = nft.shadows()[OLD].decay
    for step, expected in steps_to_decay.items():
        assert decay(step) == pytest.approx(expected)


def roll_out(model: TinyModel, key: str = "test") -> ScoredRollout:
    return scored(sample(model, rollout_request(sde_steps=(), key=key)))


def trained(stack: TrainStack, windows: range, **keys: Any) -> None:
    model = stack.model
    assert isinstance(model, TinyModel)
    for window in windows:
        with stack.weights.sampling_weights():
            one = roll_out(model, f"window-{window}")
        stack.update([one])


SLOW = {**KEYS, "algorithm.old_decay_rate": 0.4, "algorithm.old_decay_max": 0.6}


def test_the_shadow_is_the_decayed_average_of_the_trained_weights():
    model = tiny_model()
    stack = train_stack(model, {**SLOW, "stack.optimizer.learning_rate": 1e-2})
    expected = {n: p.detach().clone() for n, p in adapter_parameters(model.network).items()}
    for window, decay in enumerate((0.4, 0.6, 0.6)):
        trained(stack, range(window, window + 1))
        for name, now in adapter_parameters(model.network).items():
            expected[name] = decay * expected[name] + (1 - decay) * now.detach()
    for name, value in expected.items():
        torch.testing.assert_close(stack.weights.shadow_tensors()[f"{OLD}.{name}"], value)
        assert name in adapter_parameters(model.network)


def test_rollouts_pushes_and_probes_have_the_old_policy():
    model = tiny_model()
    stack = train_stack(model, {**SLOW, "stack.optimizer.learning_rate": 1e-2})
    trained(stack, range(2))
    payload = stack.weights.read_weights(adapter=True, with_probe=True)
    shadow = {n.removeprefix(f"{OLD}."): t for n, t in stack.weights.shadow_tensors().items()}
    assert same_bits(dict(payload.tensors), shadow)
    assert not same_bits(
        shadow, {n: p.detach() for n, p in adapter_parameters(model.network).items()}
    )
    probe = payload.probe
    assert isinstance(probe, Probe)
    before = weights(model)
    with stack.weights.sampling_weights(), torch.no_grad():
        sampled = model.velocity(probe.latents, probe.sigma, probe.conditioning)
    assert torch.equal(probe.velocity, sampled)
    assert same_bits(before, weights(model))
    assert not torch.equal(
        probe.velocity, model.velocity(probe.latents, probe.sigma, probe.conditioning)
    )


def test_resuming_brings_the_shadow_back():
    def state(stack: TrainStack) -> dict[str, Tensor]:
        return stack.weights.state_tensors(adapter_only=True) | stack.weights.shadow_tensors()

    whole = train_stack(tiny_model(), SLOW)
    trained(whole, range(4))
    half = train_stack(tiny_model(), SLOW)
    trained(half, range(2))
    resumed = train_stack(tiny_model(), SLOW)
    resumed.weights.load_state(
        half.weights.state_tensors(adapter_only=True),
        half.weights.shadow_tensors(),
        half.weights.optimizer_state(),
    )
    trained(resumed, range(2, 4))
    assert same_bits(state(whole), state(resumed))
    assert not same_bits(state(whole), state(half))


def test_a_checkpoint_of_another_algorithm_is_refused_and_changes_nothing():
    nft, grpo = train_stack(tiny_model(), SLOW), train_stack(tiny_model())
    trained(nft, range(1))
    before = nft.weights.state_tensors(adapter_only=True)
    with pytest.raises(ModelError, match=r"shadow weights none.*keeps \['old'\]"):
        nft.weights.load_state(
            grpo.weights.state_tensors(adapter_only=True),
            grpo.weights.shadow_tensors(),
            grpo.weights.optimizer_state(),
        )
    assert same_bits(before, nft.weights.state_tensors(adapter_only=True))
    with pytest.raises(ModelError, match=r"shadow weights \['old'\].*keeps none"):
        grpo.weights.load_state(
            nft.weights.state_tensors(adapter_only=True),
            nft.weights.shadow_tensors(),
            nft.weights.optimizer_state(),
        )


def test_the_reference_is_the_model_without_its_adapter():
    model = tiny_model()
    randomize_adapter(model)
    stack = train_stack(model, {**KEYS, "algorithm.kl_coefficient": 1.0})
    (stats,) = stack.update([roll_out(model)])
    assert stats.metrics["velocity_deviation"] > 1e-3
    assert stats.metrics["old_deviation"] == 0
