"""The two built-in engines against the contract and against each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import (
    CPU,
    LATENT_SHAPE,
    host_arena,
    offload,
    onload,
    randomize_adapter,
    rollout_request,
    sample,
    sampling_params,
    tiny_model,
    weights,
)
from torch import Tensor

from unirl.core.components import Moved
from unirl.core.errors import ResidencyError, WeightSyncError
from unirl.core.types import Rollout, RolloutRequest
from unirl.models.lora import adapter_parameters
from unirl.rollout.replica import ReplicaEngine
from unirl.rollout.sampling import sample_with_model
from unirl.rollout.trainside import TrainsideEngine
from unirl.samplers.kernels import make_kernel
from unirl.samplers.noise import keyed_noise
from unirl.weight_sync.payload import Probe, WeightPayload


def trainside(version: Callable[[], int] = lambda: 0, **model: Any) -> TrainsideEngine:
    tiny = tiny_model(**model)
    randomize_adapter(tiny)
    return TrainsideEngine(tiny, 0, CPU, version, nullcontext)


def replica(forward_batch_size: int = 0, **model: Any) -> ReplicaEngine:
    tiny = tiny_model(**model)
    randomize_adapter(tiny)
    return ReplicaEngine(tiny, forward_batch_size, CPU, host_arena(), None)


def generate_awake(engine: ReplicaEngine, request: RolloutRequest) -> Rollout:
    onload(engine)
    return engine.generate(request)


def same(left: Rollout, right: Rollout) -> bool:
    a, b = left.trajectory, right.trajectory
    pairs = [
        (a.latents, b.latents),
        (a.next_latents, b.next_latents),
        (a.log_probs, b.log_probs),
        (a.final_latents, b.final_latents),
        (left.images, right.images),
    ]
    return all(torch.equal(x, y) for x, y in pairs)


# --- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_both_engines_sample_the_same_bits_from_the_same_weights(compute_dtype, guidance_scale):
    request = rollout_request(guidance_scale=guidance_scale)
    left = trainside(compute_dtype=compute_dtype).generate(request)
    right = generate_awake(
        replica(compute_dtype=compute_dtype), replace(request, weight_version=None)
    )
    assert same(left, right)


def test_shapes_and_dtypes_of_a_rollout():
    rollout = trainside().generate(rollout_request(sde_steps=(0, 1, 3)))
    assert rollout.trajectory.latents.shape == (8, 3, *LATENT_SHAPE)
    assert rollout.trajectory.log_probs.shape == (8, 3)
    assert rollout.images.shape == (8, 3, 8, 8)
    assert rollout.images.dtype == torch.uint8
    assert rollout.negative_conditioning is None


def test_an_ode_request_records_nothing_and_still_gives_images():
    rollout = trainside().generate(rollout_request(sde_steps=(), eta=0.0))
    assert rollout.trajectory.latents.shape == (8, 0, *LATENT_SHAPE)
    assert rollout.trajectory.log_probs.shape == (8, 0)
    assert len(rollout.images) == 8


@pytest.mark.parametrize("forward_batch_size", [1, 3, 8, 100])
def test_the_forward_batch_size_does_not_change_the_noise_or_the_order_of_samples(
    forward_batch_size,
):
    request = rollout_request()
    model = tiny_model()
    randomize_adapter(model)
    whole, parts = sample(model, request), sample(model, request, forward_batch_size)
    torch.testing.assert_close(
        parts.trajectory.final_latents, whole.trajectory.final_latents, rtol=1e-3, atol=1e-4
    )
    start = keyed_noise(request.initial_noise_keys, LATENT_SHAPE)
    assert torch.equal(parts.trajectory.latents[:, 0], start)
    assert torch.equal(whole.trajectory.latents[:, 0], start)


def test_progress_counts_every_step_of_every_batch_and_ends_with_all_samples():
    request = rollout_request(num_prompts=1, samples_per_prompt=3, num_steps=4)
    noted: list[float] = []
    sample_with_model(tiny_model(), request, 2, CPU, noted.append)
    assert noted == [0.5, 1.0, 1.5, 2.0, 2.25, 2.5, 2.75, 3.0]


def test_equal_start_keys_give_equal_starts_with_step_noise_of_their_own():
    request = rollout_request(num_prompts=1)
    request = replace(request, initial_noise_keys=("same",) * 4)
    trajectory = trainside().generate(request).trajectory
    assert all(torch.equal(start, trajectory.latents[0, 0]) for start in trajectory.latents[:, 0])
    after = trajectory.next_latents[:, 0]
    assert not any(torch.equal(after[i], after[j]) for i in range(4) for j in range(i))


def test_a_shared_start_is_asked_once_until_it_was_stochastic(monkeypatch: pytest.MonkeyPatch):
    request = rollout_request(sde_steps=(1, 3))
    same = replace(request, initial_noise_keys=("same",) * 8)
    distinct_starts = replace(request, initial_noise_keys=tuple(f"same{i}" for i in range(8)))
    model, asked = tiny_model(), []
    velocity = model.velocity

    def counting(latents: Tensor, sigma: Tensor, conditioning: Any) -> Tensor:
        asked.append(len(latents))
        return velocity(latents, sigma, conditioning)

    monkeypatch.setattr(model, "velocity", counting)
    sample(model, distinct_starts)
    rollout = sample(model, same)
    assert asked == [8] * 5 + [2, 2, 8, 8, 8]
    first = rollout.trajectory.latents[:, 0]
    noise = keyed_noise(["same"], LATENT_SHAPE).expand(8, *LATENT_SHAPE)
    sigma = torch.ones(8)
    with torch.no_grad():
        expected = noise + 0.2 * -velocity(noise, sigma, rollout.conditioning)
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)


def test_each_step_of_each_sample_draws_noise_of_its_own():
    request = rollout_request(sde_steps=(0, 1, 3))
    model = tiny_model()
    rollout = sample(model, request, forward_batch_size=3)
    kernel = make_kernel("flow", 0.7, request.sigmas)
    for position, step in enumerate(request.sde_steps[0]):
        latents = rollout.trajectory.latents[:, position]
        sigma, sigma_next = (torch.full((8,), s) for s in request.sigmas[step : step + 2])
        with torch.no_grad():
            velocity = model.velocity(latents, sigma, rollout.conditioning)
        noise = keyed_noise([f"{key}/step-{step}" for key in request.step_noise_keys], LATENT_SHAPE)
        expected = kernel.transition(latents, velocity, sigma, sigma_next).sample(noise)
        after = rollout.trajectory.next_latents[:, position]
        torch.testing.assert_close(after, expected, rtol=1e-3, atol=1e-4)


def test_every_sample_has_its_prompts_conditioning():
    rollout = trainside().generate(rollout_request())
    ids = rollout.conditioning.token_ids  # type: ignore[attr-defined]
    assert torch.equal(ids[:4], ids[:1].expand(4, -1))
    assert torch.equal(ids[4:], ids[4:5].expand(4, -1))
    assert not torch.equal(ids[0], ids[4])


def test_each_prompt_is_encoded_once_whatever_the_group_and_the_batches(
    monkeypatch: pytest.MonkeyPatch,
):
    model, asked = tiny_model(), []
    encode = model.encode

    def counting(records: Any, sampling: Any) -> Any:
        asked.append([record.text for record in records])
        return encode(records, sampling)

    monkeypatch.setattr(model, "encode", counting)
    request = rollout_request(num_prompts=2, samples_per_prompt=4, guidance_scale=2.0)
    sample(model, request, forward_batch_size=3)
    assert asked == [request.prompts.texts, [""]]


def test_guidance_moves_away_from_the_unconditional_sample():
    def final(scale: float) -> Tensor:
        request = rollout_request(guidance_scale=scale, sde_steps=(), eta=0.0)
        return trainside().generate(request).trajectory.final_latents

    strong = trainside().generate(rollout_request(guidance_scale=4.0))
    assert strong.negative_conditioning is not None
    assert not strong.negative_conditioning.token_ids.any()  # type: ignore[attr-defined]
    one, just_above, two = final(1.0), final(1.0 + 1e-6), final(2.0)
    torch.testing.assert_close(one, just_above, rtol=1e-3, atol=1e-3)
    assert (two - one).abs().max() > 0.05


def test_sampling_leaves_no_gradient_graph():
    rollout = trainside().generate(rollout_request())
    assert not rollout.trajectory.final_latents.requires_grad
    assert not rollout.trajectory.log_probs.requires_grad


# --- versions -------------------------------------------------------------------------------------


def test_trainside_follows_the_train_stacks_version_and_refuses_any_other():
    version = 0
    engine = trainside(lambda: version)
    engine.generate(rollout_request(weight_version=0))
    version = 1
    with pytest.raises(WeightSyncError, match="weight version 0, holding 1"):
        engine.generate(rollout_request(weight_version=0))


@pytest.mark.parametrize("asked", [0, 3])
def test_a_replica_refuses_a_version_it_does_not_hold(asked):
    engine = replica()
    with pytest.raises(WeightSyncError, match=f"weight version {asked}, holding None"):
        generate_awake(engine, rollout_request(weight_version=asked))


# --- sleeping -------------------------------------------------------------------------------------


def payload(engine: ReplicaEngine, version: int = 1, scale: float = 0.1) -> WeightPayload:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(p.shape, generator=generator) * scale
        for name, p in adapter_parameters(engine._model.network).items()
    }
    return WeightPayload(version, tensors, is_adapter=True, probe=None)


def a_probe() -> Probe:
    latents = torch.zeros(1, *LATENT_SHAPE)
    conditioning = tiny_model().example_conditioning(
        1, sampling_params(), torch.Generator().manual_seed(0)
    )
    return Probe(latents, torch.tensor([0.7]), conditioning, latents, latents)


def test_a_sleeping_replica_refuses_every_use():
    engine = replica()
    uses: dict[str, Callable[[], object]] = {
        "generate": lambda: engine.generate(rollout_request(weight_version=None)),
        "load weights": lambda: engine.load_weights(payload(engine)),
        "answer a probe": lambda: engine.answer(a_probe()),
    }
    for asleep in range(2):
        for action, use in uses.items():
            with pytest.raises(ResidencyError, match=f"asked to {action} while parked"):
                use()
        if not asleep:
            onload(engine)
            offload(engine)


def test_trainside_sleeps_and_wakes_without_moving_anything():
    engine = trainside()
    assert (offload(engine), onload(engine), offload(engine)) == (Moved(0),) * 3
    engine.generate(rollout_request())


def test_a_replica_starts_off_the_device_and_wakes_and_sleeps_only_once():
    engine = replica()
    assert all(p.untyped_storage().nbytes() == 0 for p in engine._model.network.parameters())
    assert offload(engine) == Moved(0)
    assert onload(engine).num_bytes > 0
    assert onload(engine) == Moved(0)


def test_sleep_copies_only_what_a_push_wrote():
    engine = replica()
    onload(engine)
    adapter = sum(p.numel() * 4 for p in adapter_parameters(engine._model.network).values())
    buffers = sum(b.numel() * 4 for b in engine._model.network.buffers())
    assert offload(engine).num_bytes == buffers
    onload(engine)
    engine.load_weights(payload(engine))
    assert offload(engine).num_bytes == adapter + buffers


def test_a_pushed_adapter_survives_sleep():
    engine = replica()
    onload(engine)
    engine.load_weights(payload(engine))
    before = weights(engine._model)  # type: ignore[arg-type]
    expected = engine.generate(rollout_request(weight_version=1))
    for _ in range(2):
        offload(engine)
        onload(engine)
    assert same(engine.generate(rollout_request(weight_version=1)), expected)
    assert all(torch.equal(v, before[n]) for n, v in weights(engine._model).items())  # type: ignore[arg-type]
