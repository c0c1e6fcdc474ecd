"""Pipelines without a family of their own, driven through their own call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import policy, prompts, sampling_params, scored
from diffusers import ChromaPipeline
from families.case import FamilyCase, uint8_of
from families.flux import CASES as FLUX
from families.sd3 import CASES as SD3
from families.sd3 import build_tiny_sd3
from tiny_chroma import build_tiny_chroma

from unirl.algorithms.making import make_algorithm
from unirl.config.schema import AlgorithmConfig
from unirl.core.errors import ModelError
from unirl.core.types import PromptBatch, RolloutRequest, SamplingParams
from unirl.models.base import DiffusionModel, Frozen, LoadSettings
from unirl.models.generic import GenericModel
from unirl.models.lora import adapter_parameters, attach_lora
from unirl.rollout.sampling import sample_with_model
from unirl.samplers.noise import keyed_noise

CPU = torch.device("cpu")
SAMPLING = sampling_params(num_steps=4, height=32, width=64, eta=0.0)
KNOWN = {case.name: case for case in (*SD3, FLUX[0])}
"""A classifier-free one and one with embedded guidance, which families of their own know too."""


def settings(dtype: torch.dtype = torch.float32, frozen: Frozen = Frozen.ALL) -> LoadSettings:
    return LoadSettings(
        frozen_dtype=dtype, compute_dtype=dtype, max_sequence_length=24, frozen=frozen
    )


@pytest.fixture(scope="module", params=KNOWN)
def case(request: pytest.FixtureRequest) -> FamilyCase:
    return KNOWN[request.param]


@pytest.fixture(scope="module")
def folder(case: FamilyCase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case.build(tmp_path_factory.mktemp("generic") / case.name)


def request_of(
    model: DiffusionModel, sampling: SamplingParams, sde_steps: tuple[int, ...] = ()
) -> RolloutRequest:
    keys = ("generic/0", "generic/1")
    return RolloutRequest(
        prompts=PromptBatch(prompts("a red cat", "a sign that says 374")),
        samples_per_prompt=1,
        sampling=sampling,
        sigmas=model.sigmas(sampling),
        sde_steps=(sde_steps,) * 2,
        initial_noise_keys=keys,
        step_noise_keys=keys,
        weight_version=None,
    )


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_samples_and_pictures_are_those_of_the_family_that_knows_the_pipeline(
    case: FamilyCase, folder: Path, guidance_scale: float
) -> None:
    sampling = replace(SAMPLING, guidance_scale=guidance_scale)
    generic, known = GenericModel.load(folder, settings()), case.load(folder)
    assert generic.sigmas(sampling) == pytest.approx(known.sigmas(sampling), abs=1e-6)
    ours = sample_with_model(generic, request_of(generic, sampling), 0, CPU)
    theirs = sample_with_model(known, request_of(known, sampling), 0, CPU)
    # Layouts differ where a pipeline packs its latents, and so does the noise of a key.
    if ours.trajectory.final_latents.shape == theirs.trajectory.final_latents.shape:
        torch.testing.assert_close(
            ours.trajectory.final_latents, theirs.trajectory.final_latents, rtol=0, atol=1e-4
        )
        assert (ours.images.int() - theirs.images.int()).abs().max() <= 1
    assert ours.images.shape == theirs.images.shape == (2, 3, 32, 64)


def test_replay_gives_ratio_one_and_gradients_reach_the_adapter(folder: Path) -> None:
    model = GenericModel.load(folder, settings())
    attach_lora(model.network, 4, 8.0, ("to_q", "to_v"), seed=0)
    sampling = replace(SAMPLING, eta=0.7, guidance_scale=3.0)
    rollout = sample_with_model(model, request_of(model, sampling, (1, 2)), 0, CPU)
    algorithm = make_algorithm(AlgorithmConfig(old_log_prob="rollout"))
    rows = algorithm.rows([scored(rollout)])
    anchored, _ = algorithm.anchor(policy(model), rows, [torch.arange(len(rows))])
    for part in torch.arange(len(rows)).split(2):
        losses = algorithm.loss(policy(model), anchored.select(part))
        assert not losses.details["log_ratio"].any()
    model.guided_velocity(
        rows.latents[:2], rows.sigma[:2], rollout.conditioning, None, sampling
    ).square().mean().backward()
    trained = adapter_parameters(model.network)
    assert all(p.grad is not None for p in trained.values())
    assert any(p.grad.any() for p in trained.values() if p.grad is not None)


def test_rows_of_different_levels_are_each_asked_at_their_own(folder: Path) -> None:
    model = GenericModel.load(folder, settings())
    conditioning = model.encode(prompts("a red cat", "9"), SAMPLING)
    latents = torch.randn(2, *model.latent_shape(SAMPLING), generator=torch.Generator())
    both = model.velocity(latents, torch.tensor([0.9, 0.2]), conditioning)
    for row, sigma in enumerate((0.9, 0.2)):
        index = torch.tensor([row])
        alone = model.velocity(latents[index], torch.tensor([sigma]), conditioning.select(index))
        torch.testing.assert_close(both[index], alone, rtol=0, atol=1e-5)


def test_prompts_are_encoded_once(folder: Path) -> None:
    model = GenericModel.load(folder, settings())
    asked: list[Any] = []
    encoder = model.frozen_modules["text_encoder"]
    encoder.register_forward_hook(lambda *_: asked.append(1))
    request = request_of(model, SAMPLING)
    del asked[:]
    sample_with_model(model, request, 0, CPU)
    sample_with_model(model, request, 0, CPU)
    assert 0 < len(asked) <= 3  # the batch, and the empty prompt of decoding


def test_a_pipeline_that_does_more_than_its_scheduler_sees_is_refused(tmp_path: Path) -> None:
    model = GenericModel.load(build_tiny_sd3(tmp_path / "sd3", with_t5=True), settings())
    call = model._call

    def drifting(pipeline: Any, *args: Any, **kwargs: Any) -> Any:
        output = call(pipeline, *args, **kwargs)
        return (output[0] * 1.1, *output[1:]) if kwargs["output_type"] == "latent" else output

    model._call = drifting
    with pytest.raises(ModelError, match="It needs a family of its own"):
        model.sigmas(SAMPLING)


def test_another_scheduler_is_refused(tmp_path: Path) -> None:
    folder = build_tiny_sd3(tmp_path / "sd3", with_t5=True)
    index = folder / "model_index.json"
    text = index.read_text().replace("FlowMatchEuler", "FlowMatchHeun")
    index.write_text(text)
    config = folder / "scheduler" / "scheduler_config.json"
    config.write_text(config.read_text().replace("FlowMatchEuler", "FlowMatchHeun"))
    with pytest.raises(ModelError, match="found FlowMatchHeunDiscreteScheduler"):
        GenericModel.load(folder, settings())


def test_a_pipeline_unirl_has_never_seen_samples_as_by_itself(tmp_path: Path) -> None:
    folder = build_tiny_chroma(tmp_path / "chroma")
    sampling = replace(SAMPLING, guidance_scale=3.0)
    model = GenericModel.load(folder, settings())
    request = request_of(model, sampling)
    ours = sample_with_model(model, request, 0, CPU)
    pipeline = ChromaPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    start = keyed_noise(request.initial_noise_keys, model.latent_shape(sampling))
    words = {
        "prompt": request.prompts.texts,
        "height": 32,
        "width": 64,
        "num_inference_steps": 4,
        "guidance_scale": 3.0,
        "max_sequence_length": 24,
    }
    theirs = pipeline(**words, latents=start, output_type="latent").images
    torch.testing.assert_close(ours.trajectory.final_latents, theirs, rtol=0, atol=1e-4)
    pictures = uint8_of(pipeline(**words, latents=start, output_type="pil").images)
    assert (ours.images.int() - pictures.int()).abs().max() <= 1
