"""What the proofs of all families do not say about Wan."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler
from families.wan import BOUNDARY, CASES
from torch import Tensor

from unirl.core.errors import ModelError
from unirl.planning.weightless import WeightlessMode, make_weightless

CASE, TWO = CASES[0], CASES[-1]
SAMPLING = CASE.sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASE.build(tmp_path_factory.mktemp("models") / "wan")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return CASE.load(folder)


@pytest.mark.parametrize("shift", [3.0, 5.0, 8.0, 12.0])
def test_the_network_is_told_the_timesteps_of_unipc(model: Any, shift: float) -> None:
    for num_steps in range(2, 60):
        scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
        )
        scheduler.set_timesteps(num_steps)
        levels = scheduler.sigmas[:-1].clone()
        levels[0] = 1  # as `sigmas` makes it
        assert model._timesteps(levels).tolist() == scheduler.timesteps.tolist(), num_steps


def test_the_first_frame_does_not_depend_on_the_others(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, *model.latent_shape(SAMPLING), generator=generator)
    every = model.decode(latents, SAMPLING)
    first = model.decode(latents, replace(SAMPLING, decoded_frames="first"))
    second = model.decode(latents, replace(SAMPLING, decoded_frames=2))
    assert every.shape == (2, 5, 3, 32, 48)
    assert torch.equal(first, every[:, :1])
    assert torch.equal(second, every[:, ::2])


def test_latents_of_a_video_are_those_the_encoder_gives(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    video = torch.randint(0, 256, (2, 5, 3, 32, 48), dtype=torch.uint8, generator=generator)
    latents = model.latents_of(video)
    assert latents.shape == (2, *model.latent_shape(SAMPLING))
    vae = model.pipeline.vae
    own = vae.encode(video.transpose(1, 2) / 127.5 - 1).latent_dist.mode()
    mean, std = (
        torch.tensor(vae.config[f"latents_{n}"]).view(-1, 1, 1, 1) for n in ("mean", "std")
    )
    torch.testing.assert_close(latents, (own - mean) / std)


def test_one_frame_is_an_image(model: Any) -> None:
    still = replace(SAMPLING, num_frames=1)
    assert model.latent_shape(still) == (16, 1, 4, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_frames": 6}, r"sampling\.num_frames=6.*Set .* to 5 or 9"),
        ({"height": 40}, r"sampling\.height=40.*multiples of 16"),
        ({"low_noise_guidance_scale": 3.0}, r"low_noise_guidance_scale=3.*one network.*null"),
    ],
)
def test_settings_that_do_not_fit_are_named(
    model: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        model.latent_shape(replace(SAMPLING, **changes))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expand_timesteps": True}, "expand_timesteps.*TI2V"),
        ({"boundary_ratio": 0.875}, "belong together, found boundary_ratio=0.875 and transformer"),
    ],
)
def test_folders_of_another_kind_are_refused(
    folder: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    copy = tmp_path / "wan"
    shutil.copytree(folder, copy)
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").write_text(json.dumps({**index, **settings}))
    with pytest.raises(ModelError, match=message):
        CASE.load(copy)


# --- two networks ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return TWO.load(TWO.build(tmp_path_factory.mktemp("models") / "wan2.2"))


def asked(model: Any, levels: list[float]) -> Tensor:
    """[B, *latent] velocities of rows at these levels, each from its own noise."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(3, *model.latent_shape(SAMPLING), generator=generator)
    conditioning = model.encode(TWO.prompts[:1], SAMPLING).select(torch.zeros(3, dtype=torch.int64))
    rows = torch.arange(len(levels))
    return model.velocity(latents[rows], torch.tensor(levels), conditioning.select(rows))


def test_each_row_of_a_batch_goes_to_its_expert(experts: Any) -> None:
    mixed = asked(experts, [0.3, 0.95, 0.5])
    high, low = asked(experts, [0.95] * 3), asked(experts, [0.3, 0.3, 0.5])
    torch.testing.assert_close(mixed[[0, 2]], low[[0, 2]], rtol=0, atol=1e-6)
    torch.testing.assert_close(mixed[1], high[1], rtol=0, atol=1e-6)
    experts.network.transformer.proj_out.weight.data *= 2
    assert torch.equal(asked(experts, [0.3, 0.3, 0.5]), low)
    assert not torch.allclose(asked(experts, [0.95] * 3), high)
    experts.network.transformer.proj_out.weight.data /= 2


def test_the_boundary_itself_is_high_noise(experts: Any) -> None:
    assert experts.network.boundary == 1000 * BOUNDARY
    scales = experts._guidance_scales(
        torch.tensor([1.0, BOUNDARY, BOUNDARY - 1e-3]),
        replace(SAMPLING, guidance_scale=4.0, low_noise_guidance_scale=3.0),
    )
    assert scales.tolist() == [4, 4, 3]


def test_an_expert_without_rows_takes_part_with_gradients_of_zero(experts: Any) -> None:
    experts.network.requires_grad_(True)
    asked(experts, [0.95, 0.99, 1.0]).square().mean().backward()
    for name, parameter in experts.network.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()) == name.startswith("transformer."), name
    experts.network.requires_grad_(False)


def test_a_plan_has_all_rows_in_one_expert(experts: Any) -> None:
    model = copy.deepcopy(experts)
    make_weightless(model.network)
    with WeightlessMode():
        latents = torch.zeros(3, *model.latent_shape(SAMPLING))
        conditioning = model.example_conditioning(3, SAMPLING, torch.Generator())
        velocity = model.velocity(latents, torch.full((3,), 0.5), conditioning)
    assert velocity.shape == latents.shape


def test_one_scale_for_both_experts_is_the_default(experts: Any) -> None:
    sigma = torch.tensor([0.9, 0.1])
    scales = experts._guidance_scales(sigma, replace(SAMPLING, guidance_scale=4.0))
    assert scales.tolist() == [4, 4]
