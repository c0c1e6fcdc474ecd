"""The published configurations that ship with unirl have the published numbers of parameters."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from builders import sampling_params

from unirl.cli.compose import compose, compose_and_check
from unirl.config.resources import release_names
from unirl.config.schema import RunConfig
from unirl.models.base import DiffusionModel
from unirl.planning.blueprint import blueprint_model

CLIP_L, CLIP_G, T5_XXL, KL_VAE = 0.1237, 0.6947, 4.762, 0.0838
SD3_ENCODERS = {
    "vae": KL_VAE,
    "text_encoder": CLIP_L,
    "text_encoder_2": CLIP_G,
    "text_encoder_3": T5_XXL,
}
WAN_ENCODERS = {"vae": 0.1269, "text_encoder": 5.68}
FLUX_ENCODERS = {
    "vae": KL_VAE,
    "text_encoder": 0.1231,  # CLIP-L without its projection
    "text_encoder_2": T5_XXL,
}
BILLIONS = {
    "sd1.5": {"network": 0.8595, "vae": 0.0837, "text_encoder": 0.1231},
    "sdxl-base-1.0": {
        "network": 2.567,
        "vae": 0.0837,
        "text_encoder": 0.1231,
        "text_encoder_2": CLIP_G,
    },
    "sd3-medium": {"network": 2.03, **SD3_ENCODERS},
    "sd3.5-medium": {"network": 2.24, **SD3_ENCODERS},
    "sd3.5-large": {"network": 8.06, **SD3_ENCODERS},
    "flux.1-dev": {"network": 11.90, **FLUX_ENCODERS},
    "flux.1-kontext-dev": {"network": 11.90, **FLUX_ENCODERS},
    "flux.2-dev": {"network": 32.22, "vae": 0.0840, "text_encoder": 24.01},
    "flux.2-klein-4b": {"network": 3.88, "vae": 0.0840, "text_encoder": 4.02},
    "flux.2-klein-9b": {"network": 9.08, "vae": 0.0840, "text_encoder": 8.19},
    "ltx-2": {"network": 18.88, "vae": 1.222, "text_encoder": 12.20, "connectors": 1.431},
    "minimax-h3": {"network": 33.12, "vae": 2.604, "text_encoder": 33.36},
    "qwen-image": {"network": 20.43, "vae": 0.1269, "text_encoder": 8.29},
    "qwen-image-edit-2509": {"network": 20.43, "vae": 0.1269, "text_encoder": 8.29},
    # Those of the class defaults it is made of, and of Qwen3-VL 8B.
    "qwen-image-2.1": {"network": 7.115, "vae": 0.3377, "text_encoder": 8.767},
    "sana-1.6b": {"network": 1.605, "vae": 0.3122, "text_encoder": 2.614},
    "hunyuan-video": {
        "network": 12.82,
        "vae": 0.2465,
        "text_encoder": 7.505,
        "text_encoder_2": 0.1231,
    },
    # Its authors state 8.3; the others are those of the class defaults it is made of.
    "hunyuan-video-1.5-480p-t2v": {
        "network": 8.327,
        "vae": 1.261,
        "text_encoder": 7.071,
        "text_encoder_2": 0.2193,
    },
    "wan2.1-t2v-1.3b": {"network": 1.419, **WAN_ENCODERS},
    "wan2.1-t2v-14b": {"network": 14.29, **WAN_ENCODERS},
    "wan2.1-i2v-14b": {"network": 16.39, **WAN_ENCODERS, "image_encoder": 0.6308},
    "wan2.2-t2v-a14b": {"network": 2 * 14.29, **WAN_ENCODERS},
    "z-image-turbo": {"network": 6.15, "vae": KL_VAE, "text_encoder": 4.02},
}

FROM_DEFAULTS = ("hunyuan-video-1.5-480p-t2v", "qwen-image-2.1")
"""No published file was there to take them from, and a plan says so."""

EARLIEST = pytest.approx(0.8935, abs=1e-4)
STARTS = {
    "sd1.5": EARLIEST,
    "sdxl-base-1.0": EARLIEST,
    "sana-1.6b": pytest.approx(0.9997, abs=1e-4),
}
"""The first noise level of 10 steps, where it is not 1: that of timestep 901, or of 999.7."""


NUM_FRAMES = {"minimax-h3": 124}
"""The fewest, where they are more than one."""
TEXT_TOKENS = {"wan2.1-i2v-14b": 512}
"""model.max_sequence_length, where only one is taken."""


def recipe(release: str, *keys: str) -> RunConfig:
    config = compose(
        "diffusion/sd3/sd3_trainside",
        [
            *("model.path=.", f"model.release={release}"),
            f"model.max_sequence_length={TEXT_TOKENS.get(release, 256)}",
            *keys,
        ],
    )
    return config.model_copy(update={"model": config.model.model_copy(update={"path": ""})})


def test_every_release_is_checked_here() -> None:
    assert release_names() == tuple(sorted(BILLIONS))


@pytest.mark.parametrize("release", BILLIONS)
def test_parameters_are_those_published(release: str) -> None:
    blueprint = blueprint_model(recipe(release), with_encoders=True)
    model = blueprint.model
    assert blueprint.source.startswith("published") == (release not in FROM_DEFAULTS)
    assert f"configs of {release}" in blueprint.source
    assert ("not checked" in blueprint.source) == (release in FROM_DEFAULTS)
    modules = {"network": model.network, **model.frozen_modules}
    assert modules.keys() == BILLIONS[release].keys()
    for name, module in modules.items():
        frozen = [p for path, p in module.named_parameters() if ".lora_" not in path]
        assert all(parameter.is_meta for parameter in module.parameters())
        count = sum(parameter.numel() for parameter in frozen) / 1e9
        assert count == pytest.approx(BILLIONS[release][name], rel=0.01)


@pytest.mark.parametrize("release", BILLIONS)
def test_a_release_trains_an_adapter_or_everything(release: str) -> None:
    adapter = trained(blueprint_model(recipe(release), with_encoders=False).model)
    everything = trained(blueprint_model(recipe(release, "stack.lora=null"), False).model)
    network_bytes = 4 * BILLIONS[release]["network"] * 1e9
    assert 0 < adapter < 0.02 * network_bytes
    assert everything == pytest.approx(network_bytes, rel=0.01)


def trained(model: DiffusionModel) -> int:
    return sum(p.nbytes for p in model.network.parameters() if p.requires_grad)


@pytest.mark.parametrize("release", BILLIONS)
def test_schedule_and_latents_are_there_without_weights(release: str) -> None:
    model = blueprint_model(recipe(release), with_encoders=False).model
    assert model.frozen_modules == {}
    sampling = replace(
        sampling_params(num_steps=10, height=512, width=512),
        num_frames=NUM_FRAMES.get(release, 1),
    )
    sigmas = model.sigmas(sampling)
    assert (len(sigmas), sigmas[0], sigmas[-1]) == (11, STARTS.get(release, 1.0), 0.0)
    images = {32 * 16 * 16, 4 * 64 * 64, 16 * 64 * 64, 128 * 32 * 32, 32 * 32 * 32}
    with_sound = {128 * (16 * 16 + 1), 96 * 37 * 16 * 16 + 2 * 32 * 207}
    expected = images | with_sound
    assert prod(model.latent_shape(sampling)) in expected


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    _, problems = compose_and_check(
        "diffusion/sd3/sd3_trainside", ["model.path=.", "model.release=flux1-dev"]
    )
    assert [problem.key for problem in problems] == ["model.release"]
    assert problems[0].message.endswith("Did you mean flux.1-dev?")
