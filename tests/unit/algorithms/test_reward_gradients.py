"""DRaFT and ReFL: which steps gradients run through, what they are, and where they lead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from builders import (
    CPU,
    LATENT_SHAPE,
    host_arena,
    policy,
    prompts,
    randomize_adapter,
    rollout_request,
    run_config,
    sample,
    sampling_params,
    scored,
    tiny_model,
)
from smooth_model import SmoothModel, assert_gradient_is_the_slope, latents, vectors
from torch import Tensor

from unirl.algorithms.base import BASE, Algorithm, Policy
from unirl.algorithms.draft import DRaFT, last_steps
from unirl.algorithms.making import make_algorithm, no_reward
from unirl.algorithms.refl import ReFL
from unirl.algorithms.rewarded import AnchoredRows, KeptRows, velocity_at
from unirl.core.errors import RewardError
from unirl.core.types import PromptRecord, RolloutRequest
from unirl.distributed.ranks import OneRank
from unirl.models.base import DiffusionModel
from unirl.models.lora import adapter_disabled, adapter_parameters
from unirl.models.tiny import TinyModel
from unirl.samplers.noise import keyed_noise
from unirl.train.backend import WholeBackend
from unirl.train.stack import TrainStack

RECORDS = tuple(PromptRecord(str(i), f"prompt {i}", {"wanted": 0.2 * i}) for i in range(3))
STEPS = 5


def closeness(images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
    """Near each prompt's wanted brightness; at most 0."""
    wanted = torch.tensor([record.metadata["wanted"] for record in records])
    return -((images.mean(dim=(1, 2, 3)) - wanted.to(images)) ** 2)


def redness(images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
    return images[:, 0].mean(dim=(1, 2)) - images[:, 1:].mean(dim=(1, 2, 3))


def draft(reward: Any = redness, **keys: Any) -> DRaFT:
    return DRaFT(run_config({f"algorithm.{k}": v for k, v in keys.items()}).algorithm, reward)


def refl(reward: Any = redness, **keys: Any) -> ReFL:
    return ReFL(run_config({f"algorithm.{k}": v for k, v in keys.items()}).algorithm, reward)


def smooth_policy(model: SmoothModel) -> Policy:
    weights = {BASE: lambda: adapter_disabled(model.network)}
    return Policy(cast(DiffusionModel, model), weights, progress=0.0)


def smooth_rows(num_steps: int, guidance_scale: float) -> KeptRows:
    """3 samples before the last of 5 steps; two rows of the last one."""
    sigma = torch.tensor([1 - step / STEPS for step in range(STEPS)], dtype=torch.float64)
    return KeptRows(
        latents=latents(4, num_steps),
        sigma=sigma[-num_steps:].expand(4, -1),
        sample_index=torch.tensor([0, 1, 2, 2]),
        records=RECORDS,
        conditioning=vectors(3),
        negative_conditioning=vectors(3, seed=8) if guidance_scale > 1 else None,
        sampling=sampling_params(guidance_scale=guidance_scale),
    )


def ode_request(algorithm: Algorithm[Any, Any], rollout_id: int = 0, **keys: Any) -> RolloutRequest:
    """What the trainer asks for with sampling.eta=0."""
    request = rollout_request(num_steps=STEPS, sde_steps=(), eta=0.0, **keys)
    return replace(request, kept_steps=algorithm.kept_steps(STEPS, rollout_id, seed=0))


def adapted_model(**keys: Any) -> TinyModel:
    model = tiny_model(**keys)
    randomize_adapter(model)
    return model


def gradients(model: TinyModel, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(adapter_parameters(model.network).values())))


def algorithm_gradients(
    algorithm: Algorithm[Any, Any], model: TinyModel, request: RolloutRequest
) -> list[Tensor]:
    """Of the mean loss over all rows of one rollout."""
    rows = algorithm.rows([scored(sample(model, request))])
    rows, _ = algorithm.anchor(policy(model), rows, [torch.arange(len(rows))])
    return gradients(model, algorithm.loss(policy(model), rows).loss.mean())


# --- gradients against finite differences ---------------------------------------------------------


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("keys", [{}, {"kl_coefficient": 0.5}, {"reward_cap": -0.01}])
def test_draft_has_the_slope_of_the_reward_through_steps_decoder_and_guidance(
    num_steps: int, guidance_scale: float, keys: dict[str, float]
) -> None:
    model, algorithm = SmoothModel(), draft(closeness, last_steps=num_steps, **keys)
    rows = smooth_rows(num_steps, guidance_scale)
    with torch.no_grad():
        anchored, _ = algorithm.anchor(smooth_policy(model), rows, torch.arange(4).split(3))
    assert_gradient_is_the_slope(
        lambda: algorithm.loss(smooth_policy(model), anchored).loss.sum(), model.adapter
    )


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@pytest.mark.parametrize("keys", [{}, {"kl_coefficient": 0.5}, {"reward_cap": -0.01}])
def test_refl_has_the_slope_of_the_reward_through_its_step_decoder_and_guidance(
    guidance_scale: float, keys: dict[str, float]
) -> None:
    model, algorithm = SmoothModel(), refl(closeness, **keys)
    rows = smooth_rows(1, guidance_scale)
    with torch.no_grad():
        anchored, _ = algorithm.anchor(smooth_policy(model), rows, torch.arange(4).split(3))
    assert_gradient_is_the_slope(
        lambda: algorithm.loss(smooth_policy(model), anchored).loss.sum(), model.adapter
    )


# --- which steps ----------------------------------------------------------------------------------


def chain(model: TinyModel, request: RolloutRequest, num_last: int) -> Tensor:
    """The whole rollout written out, cut off before its last steps."""
    latents = keyed_noise(request.initial_noise_keys, LATENT_SHAPE)
    conditioning = model.encode(request.sample_records, request.sampling)
    empty = model.encode(prompts(*[""] * len(request)), request.sampling)
    for step in range(STEPS):
        if step == STEPS - num_last:
            latents = latents.detach()
        sigma = torch.full((len(latents),), request.sigmas[step])
        velocity = model.velocity(latents, sigma, conditioning)
        if request.sampling.guidance_scale > 1:
            without = model.velocity(latents, sigma, empty)
            velocity = without + request.sampling.guidance_scale * (velocity - without)
        latents = latents + (request.sigmas[step + 1] - request.sigmas[step]) * velocity
    return latents


@pytest.mark.parametrize("guidance_scale", [1.0, 2.0])
@pytest.mark.parametrize("num_last", [1, 2, STEPS])
def test_draft_differentiates_the_last_steps_and_nothing_before(
    num_last: int, guidance_scale: float
) -> None:
    model, algorithm = adapted_model(), draft(last_steps=num_last)
    request = ode_request(algorithm, guidance_scale=guidance_scale)
    ours = algorithm_gradients(algorithm, model, request)
    images = model.pixels(chain(model, request, num_last), request.sampling)
    written_out = gradients(model, -redness(images, request.sample_records).mean())
    torch.testing.assert_close(ours, written_out, rtol=1e-3, atol=1e-7)
    images = model.pixels(chain(model, request, num_last - 1 or STEPS), request.sampling)
    other = gradients(model, -redness(images, request.sample_records).mean())
    assert any((a - b).abs().max() > 1e-2 * b.abs().max() for a, b in zip(ours, other, strict=True))


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@pytest.mark.parametrize("num_last", [1, 3, STEPS])
def test_the_last_steps_made_again_end_where_the_rollout_ended(
    compute_dtype: torch.dtype, guidance_scale: float, num_last: int
) -> None:
    model, algorithm = adapted_model(compute_dtype=compute_dtype), draft(last_steps=num_last)
    rollout = sample(model, ode_request(algorithm, guidance_scale=guidance_scale))
    clean, _ = last_steps(model, algorithm.rows([scored(rollout)]))
    torch.testing.assert_close(clean, rollout.trajectory.final_latents, rtol=1e-6, atol=1e-6)


def test_a_micro_batch_of_another_size_ends_there_too() -> None:
    model, algorithm = adapted_model(), draft(last_steps=3)
    rollout = sample(model, ode_request(algorithm))
    rows = algorithm.rows([scored(rollout)])
    parts = [last_steps(model, rows.select(index))[0] for index in torch.arange(8).split(3)]
    final = rollout.trajectory.final_latents
    torch.testing.assert_close(torch.cat(parts), final, rtol=1e-5, atol=1e-5)


def test_refl_scores_the_clean_image_predicted_at_its_step() -> None:
    model, algorithm = adapted_model(), refl()
    rollout = sample(model, ode_request(algorithm))
    (step,) = rollout.request.kept_steps
    kept, sigma = rollout.trajectory.kept_latents[:, 0], rollout.request.sigmas[step]
    velocity = model.velocity(kept, torch.full((8,), sigma), rollout.conditioning)
    images = model.pixels(kept - sigma * velocity, rollout.request.sampling)
    reward = redness(images, rollout.request.sample_records)
    rows, _ = algorithm.anchor(policy(model), algorithm.rows([scored(rollout)]), [])
    losses = algorithm.loss(policy(model), rows)
    torch.testing.assert_close(losses.loss, -reward)
    torch.testing.assert_close(losses.details["reward"], reward.detach())


def test_steps_are_kept_where_gradients_begin() -> None:
    assert draft(last_steps=2).kept_steps(10, 7, seed=1) == (8, 9)
    assert draft(last_steps=10).kept_steps(10, 7, seed=1) == tuple(range(10))


def test_the_number_of_last_steps_is_drawn_per_rollout_and_the_same_when_asked_again() -> None:
    algorithm = draft(last_steps=4, random_last_steps=True)
    kept = [algorithm.kept_steps(10, rollout, seed=0) for rollout in range(60)]
    assert kept == [algorithm.kept_steps(10, rollout, seed=0) for rollout in range(60)]
    assert {steps[-1] for steps in kept} == {9}
    counts = [len(steps) for steps in kept]
    assert set(counts) == {1, 2, 3, 4}
    assert all(5 <= counts.count(count) <= 25 for count in (1, 2, 3, 4))
    assert kept != [algorithm.kept_steps(10, rollout, seed=1) for rollout in range(60)]


@pytest.mark.parametrize(
    ("start_range", "expected"),
    [([0.75, 1.0], range(30, 40)), ([0.0, 0.1], range(4)), ([0.5, 0.525], range(20, 21))],
)
def test_refl_draws_each_step_of_its_range(start_range: list[float], expected: range) -> None:
    algorithm = refl(start_range=start_range)
    drawn = [algorithm.kept_steps(40, rollout, seed=0) for rollout in range(200)]
    assert {step for steps in drawn for step in steps} == set(expected)
    assert {len(steps) for steps in drawn} == {1}
    assert drawn == [algorithm.kept_steps(40, rollout, seed=0) for rollout in range(200)]


# --- rows -----------------------------------------------------------------------------------------


def test_rows_of_a_window_keep_their_rollouts_own_level_prompt_and_conditioning() -> None:
    model, algorithm = adapted_model(), refl(start_range=[0.2, 1.0])
    other = next(i for i in range(9) if algorithm.kept_steps(STEPS, i, seed=0) != (2,))
    first = replace(ode_request(algorithm, 0), kept_steps=(2,))
    requests = [first, ode_request(algorithm, other, num_prompts=1, key="other")]
    window = [scored(sample(model, request)) for request in requests]
    rows = algorithm.rows(window)
    assert rows.sample_index.tolist() == list(range(12))
    levels = [request.sigmas[request.kept_steps[0]] for request in requests]
    assert rows.sigma.tolist() == torch.tensor([[levels[0]]] * 8 + [[levels[1]]] * 4).tolist()
    last = rows.select(torch.tensor([11, 0]))
    assert [r.text for r in last.row_records] == ["red cat", "red cat"]
    assert [r.text for r in rows.row_records[4:8]] == ["red dog"] * 4
    alone, _ = algorithm.anchor(policy(model), algorithm.rows(window[1:]), [])
    together, _ = algorithm.anchor(policy(model), rows, [])
    torch.testing.assert_close(
        algorithm.loss(policy(model), together.select(torch.arange(8, 12))).loss,
        algorithm.loss(policy(model), alone).loss,
    )


def test_each_row_is_scored_for_its_own_prompt() -> None:
    seen: list[list[str]] = []

    def reward(images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        seen.append([record.text for record in records])
        return images.mean(dim=(1, 2, 3))

    algorithm, rows = draft(reward), AnchoredRows(smooth_rows(1, 1.0), None)
    algorithm.loss(smooth_policy(SmoothModel()), rows.select(torch.tensor([3, 1])))
    assert seen == [["prompt 2", "prompt 1"]]


@pytest.mark.parametrize("make", [draft, refl])
def test_a_row_has_the_same_loss_in_any_slice(make: Any) -> None:
    model, algorithm = SmoothModel(), make(closeness, kl_coefficient=0.5)
    with torch.no_grad():
        rows, _ = algorithm.anchor(
            smooth_policy(model), smooth_rows(1, guidance_scale=2.0), torch.arange(4).split(3)
        )
        whole = algorithm.loss(smooth_policy(model), rows).loss
        for row in range(4):
            alone = rows.select(torch.tensor([row]))
            torch.testing.assert_close(
                algorithm.loss(smooth_policy(model), alone).loss, whole[row : row + 1]
            )


# --- loss, cap and distance -----------------------------------------------------------------------


def test_beyond_the_cap_nothing_is_learned() -> None:
    model, rows = SmoothModel(), AnchoredRows(smooth_rows(1, 1.0), None)
    reward = draft(closeness).loss(smooth_policy(model), rows).details["reward"]
    cap = float(reward.median())
    algorithm = draft(closeness, reward_cap=cap)
    losses = algorithm.loss(smooth_policy(model), rows)
    torch.testing.assert_close(losses.loss, (cap - reward).clamp(min=0))
    beyond = reward > cap
    assert 0 < int(beyond.sum()) < 4
    found = torch.autograd.grad(losses.loss[beyond].sum(), list(model.adapter.values()))
    assert not any(gradient.any() for gradient in found)
    metrics = algorithm.metrics(losses.details)
    assert metrics["capped_fraction"] == float((reward >= cap).float().mean())
    assert metrics["reward_mean"] == pytest.approx(float(reward.mean()))
    assert metrics["loss"] == pytest.approx(float(losses.loss.detach().mean()))


def test_saturated_pixels_are_counted() -> None:
    model, algorithm = adapted_model(), draft()
    rows = algorithm.rows([scored(sample(model, ode_request(algorithm)))])
    far = replace(rows, latents=rows.latents + 100)
    losses = algorithm.loss(policy(model), AnchoredRows(far, None))
    assert algorithm.metrics(losses.details)["saturated_fraction"] == 1
    assert not any(g.any() for g in gradients(model, losses.loss.sum()))


@pytest.mark.parametrize("make", [draft, refl])
def test_the_distance_is_that_to_the_model_without_its_adapter(make: Any) -> None:
    model = adapted_model()
    algorithm = make(lambda images, records: images.mean(dim=(1, 2, 3)) * 0, kl_coefficient=2.0)
    rows = algorithm.rows([scored(sample(model, ode_request(algorithm, guidance_scale=2.0)))])
    anchored, _ = algorithm.anchor(policy(model), rows, torch.arange(8).split(3))
    losses = algorithm.loss(policy(model), anchored)
    latents = rows.latents[:, 0]
    ours = velocity_at(model, rows, latents, 0)
    with adapter_disabled(model.network):
        base = velocity_at(model, rows, latents, 0)
    distance = ((ours - base) ** 2).mean(dim=(1, 2, 3))
    assert distance.min() > 1e-3
    torch.testing.assert_close(losses.details["velocity_deviation"], distance.detach())
    torch.testing.assert_close(losses.loss, 2 * distance)
    assert any(gradient.any() for gradient in gradients(model, losses.loss.sum()))


def test_the_distance_is_a_mean_over_the_steps() -> None:
    model, algorithm = adapted_model(), draft(last_steps=3, kl_coefficient=1.0)
    rows = algorithm.rows([scored(sample(model, ode_request(algorithm)))])
    anchored, _ = algorithm.anchor(policy(model), rows, [torch.arange(8)])
    _, velocity = last_steps(model, rows)
    with adapter_disabled(model.network):
        base = [velocity_at(model, rows, rows.latents[:, k], k) for k in range(3)]
    each = [((velocity[:, k] - base[k]) ** 2).mean(dim=(1, 2, 3)) for k in range(3)]
    found = algorithm.loss(policy(model), anchored).details["velocity_deviation"]
    torch.testing.assert_close(found, torch.stack(each).mean(dim=0).detach())


@pytest.mark.parametrize("make", [draft, refl])
def test_without_an_adapter_the_distance_is_zero(make: Any) -> None:
    model, algorithm = tiny_model(), make(kl_coefficient=1.0)
    rows = algorithm.rows([scored(sample(model, ode_request(algorithm)))])
    anchored, _ = algorithm.anchor(policy(model), rows, [torch.arange(8)])
    assert not algorithm.loss(policy(model), anchored).details["velocity_deviation"].any()


def test_no_base_forward_without_a_coefficient() -> None:
    @contextmanager
    def unexpected() -> Iterator[None]:
        raise AssertionError("the base was asked")
        yield

    model, algorithm = tiny_model(), draft()
    rows = algorithm.rows([scored(sample(model, ode_request(algorithm)))])
    anchored, _ = algorithm.anchor(Policy(model, {BASE: unexpected}, 0.0), rows, [torch.arange(8)])
    assert anchored.base_velocity is None


def test_the_adapter_is_active_again_after_a_failure_in_the_anchor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, algorithm = adapted_model(), draft(kl_coefficient=1.0)
    rows = algorithm.rows([scored(sample(model, ode_request(algorithm)))])
    before = velocity_at(model, rows, rows.latents[:, 0], 0)

    def failing(*inputs: Any) -> Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(TinyModel, "velocity", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            algorithm.anchor(policy(model), rows, [torch.arange(8)])
    assert torch.equal(velocity_at(model, rows, rows.latents[:, 0], 0), before)


# --- training -------------------------------------------------------------------------------------


def train(path: str, num_windows: int, **keys: Any) -> list[float]:
    """Mean redness of each window's rollout, all from the same noise, by the train stack."""
    model = tiny_model()
    config = run_config(
        {"algorithm.path": path, "stack.optimizer.learning_rate": 0.05, "stack.micro_batch_size": 3}
        | {f"algorithm.{key}": value for key, value in keys.items()}
    )
    algorithm = make_algorithm(config.algorithm, redness)
    stack = TrainStack(
        model,
        WholeBackend(),
        algorithm,
        config.stack,
        num_windows,
        sampling_params(),
        config.seed,
        CPU,
        OneRank(),
        host_arena(),
    )
    means = []
    for window in range(num_windows):
        rollout = sample(model, ode_request(algorithm, window))
        shown = redness(rollout.images / 255, rollout.request.sample_records)
        means.append(float(shown.mean()))
        (stats,) = stack.update([scored(rollout)])
        assert stats.skipped is None
    return means


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        ("draft", {}),
        ("draft", {"last_steps": 3, "random_last_steps": True, "kl_coefficient": 1e-3}),
        ("draft", {"last_steps": STEPS}),
        ("refl", {"kl_coefficient": 1e-3}),
    ],
)
def test_the_reward_rises(path: str, keys: dict[str, Any]) -> None:
    means = train(path, 10, **keys)
    assert means[-1] > means[0] + 0.05


def test_a_reward_that_is_missing_is_told() -> None:
    algorithm = DRaFT(run_config().algorithm, no_reward)
    with pytest.raises(RewardError, match="without a reward"):
        algorithm.loss(smooth_policy(SmoothModel()), AnchoredRows(smooth_rows(1, 1.0), None))
