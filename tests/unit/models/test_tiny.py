"""The family that ships with the package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from builders import host_arena, prompts, rollout_request, sample, sampling_params, tiny_model

from unirl.config.resources import resolve_path
from unirl.core.errors import DataError, ModelError
from unirl.memory.movers import RoleWeights, module_components
from unirl.models.base import Frozen, LoadSettings
from unirl.models.tiny import TinyModel
from unirl.models.tiny_dit import PatchEmbed, save_tiny_dit


def load(
    path: Path,
    frozen_dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
) -> TinyModel:
    settings = LoadSettings(
        frozen_dtype=frozen_dtype,
        compute_dtype=compute_dtype,
        max_sequence_length=256,
        frozen=Frozen.ALL,
    )
    return TinyModel.load(path, settings)


@pytest.fixture(scope="module")
def shipped() -> TinyModel:
    return load(resolve_path("pkg:tiny/model.safetensors"))


def test_the_shipped_model_loads_frozen_in_eval_mode_and_can_be_parked(shipped):
    assert not shipped.network.training
    assert not any(p.requires_grad for p in shipped.network.parameters())
    weights = RoleWeights(module_components("network", shipped.network), host_arena())
    assert sum(part.park(copy=True).num_bytes for part in weights.parts) > 1e6
    for part in weights.parts:
        part.unpark()


@pytest.mark.parametrize(
    ("frozen_dtype", "compute_dtype", "stored"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
    ],
)
def test_weights_are_stored_as_asked_unless_the_arithmetic_needs_float32(
    frozen_dtype, compute_dtype, stored
):
    model = load(resolve_path("pkg:tiny/model.safetensors"), frozen_dtype, compute_dtype)
    assert {p.dtype for p in model.network.parameters()} == {stored}


def test_a_saved_network_loads_back_with_the_same_output(tmp_path):
    model = tiny_model(lora_rank=None)
    path = tmp_path / "model.safetensors"
    save_tiny_dit(path, model.network, model._tokenizer, torch.float32)  # type: ignore[arg-type]
    left, right = sample(model, rollout_request()), sample(load(path), rollout_request())
    assert torch.equal(left.trajectory.final_latents, right.trajectory.final_latents)


def test_the_schedule_falls_evenly_from_one_to_zero(shipped):
    assert shipped.sigmas(sampling_params(num_steps=4)) == (1.0, 0.75, 0.5, 0.25, 0.0)


def test_pixels_are_rounded_and_clipped(shipped):
    latents = torch.tensor([-5.0, -1.0, 0.0, 0.999, 1.0, 5.0]).view(1, 1, 1, 6)
    assert shipped.decode(latents, sampling_params()).flatten().tolist() == [
        0,
        0,
        128,
        255,
        255,
        255,
    ]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("purple cat", "data.train: Unknown word 'purple' in prompt 'purple cat'"),
        ("red cat dog house", "has 4 tokens, the model reads 3"),
    ],
)
def test_a_prompt_the_model_cannot_read_is_named_with_its_key(prompt, message):
    with pytest.raises(DataError, match=message):
        tiny_model().check_prompts(prompts("red cat", prompt), "data.train")


@pytest.mark.parametrize("content", [None, b"", b"junk" * 100, b"\x10\0\0\0\0\0\0\0{}" + b" " * 14])
def test_a_file_that_cannot_be_read_is_a_model_error_that_names_it(tmp_path, content):
    path = tmp_path / "broken.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.path: .*broken\.safetensors"):
        load(path)


def test_a_batch_gives_each_sample_what_it_gets_alone():
    model = tiny_model()
    conditioning = model.encode(prompts("red cat", "blue dog", ""), sampling_params())
    latents = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([1.0, 0.5, 0.1])
    together = model.velocity(latents, sigma, conditioning)
    for row in range(3):
        one = torch.tensor([row])
        alone = model.velocity(latents[one], sigma[one], conditioning.select(one))
        torch.testing.assert_close(alone[0], together[row], rtol=1e-4, atol=1e-5)


def test_patches_are_embedded_as_by_a_convolution_in_bfloat16_too() -> None:
    """16 channels with a stride of 4: a shape that oneDNN's AMX convolution gets wrong."""
    embed, pixels = PatchEmbed(16, 128, 4), torch.randn(3, 16, 8, 16)
    expected = F.conv2d(pixels, embed.weight, embed.bias, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(embed(pixels), expected, atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = embed(pixels)
    assert rounded.dtype == torch.bfloat16
    assert (rounded - expected).norm() / expected.norm() < 0.01
