"""The Stable Diffusion 3 family against diffusers' own pipeline, on a folder of random weights."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import prompts, sampling_params
from diffusers import StableDiffusion3Pipeline
from families.sd3 import build_tiny_sd3
from safetensors.torch import load_file, save_file
from torch import Tensor

from unirl.core.errors import ModelError
from unirl.core.types import SamplingParams
from unirl.models.base import Frozen, LoadSettings
from unirl.models.sd3 import Sd3Conditioning, StableDiffusion3Model

HEIGHT, WIDTH = 32, 64
NUM_STEPS = 5
MAX_SEQUENCE_LENGTH = 24
TEXTS = ["a sign that says 374", "THE number 9, in red"]
PROMPTS = prompts(*TEXTS)
SAMPLING = sampling_params(num_steps=NUM_STEPS, height=HEIGHT, width=WIDTH, eta=0.0)


def sized(num_steps: int, height: int, width: int) -> SamplingParams:
    return sampling_params(num_steps=num_steps, height=height, width=width)


# What StableDiffusion3Pipeline's scheduler gives for 10 steps at shift 3 (public code that calls
# set_timesteps(10) has the same numbers).
SIGMAS_10_STEPS_SHIFT_3 = (
    1.0,
    0.9601293206214905,
    0.9133489727973938,
    0.857692301273346,
    0.7903682589530945,
    0.7072784900665283,
    0.602150559425354,
    0.4648760259151459,
    0.2780487835407257,
    0.008928571827709675,
    0.0,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_sd3(tmp_path_factory.mktemp("models") / "sd3")


@pytest.fixture(scope="module")
def folder_without_t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_sd3(tmp_path_factory.mktemp("models") / "sd3", with_t5=False)


@pytest.fixture(scope="module")
def model(folder: Path) -> StableDiffusion3Model:
    return load(folder)


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Any:
    return load_pipeline(folder)


def load(
    folder: Path,
    *,
    frozen_dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
    with_encoders: bool = True,
) -> StableDiffusion3Model:
    settings = LoadSettings(
        frozen_dtype=frozen_dtype,
        compute_dtype=compute_dtype,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        frozen=Frozen.ALL if with_encoders else Frozen.NONE,
    )
    return StableDiffusion3Model.load(folder, settings)


def load_pipeline(folder: Path, **components: None) -> Any:
    """Any: the annotations of diffusers are narrower than what it takes."""
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True, **components)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def start_noise(model: StableDiffusion3Model) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(len(TEXTS), *model.latent_shape(SAMPLING), generator=generator)


def test_sigmas_are_the_golden_numbers_of_the_deployed_schedule(
    model: StableDiffusion3Model,
) -> None:
    assert model.sigmas(replace(SAMPLING, num_inference_steps=10)) == pytest.approx(
        SIGMAS_10_STEPS_SHIFT_3, abs=1e-7
    )


@pytest.mark.parametrize("size", [(HEIGHT, WIDTH), (128, 128)])
@pytest.mark.parametrize("use_dynamic_shifting", [False, True])
def test_sigmas_are_those_the_pipeline_leaves_in_its_scheduler(
    tmp_path: Path, use_dynamic_shifting: bool, size: tuple[int, int]
) -> None:
    folder = build_tiny_sd3(
        tmp_path / "sd3", shift=2.5, use_dynamic_shifting=use_dynamic_shifting, with_t5=False
    )
    pipeline = load_pipeline(folder, text_encoder_3=None, tokenizer_3=None)
    pipeline(
        "9", height=size[0], width=size[1], num_inference_steps=3, output_type="latent",
        max_sequence_length=MAX_SEQUENCE_LENGTH,
    )  # fmt: skip
    theirs = pipeline.scheduler.sigmas.tolist()
    assert load(folder, with_encoders=False).sigmas(sized(3, *size)) == tuple(theirs)


def test_dynamic_shifting_gives_larger_images_noisier_steps(tmp_path: Path) -> None:
    model = load(build_tiny_sd3(tmp_path / "sd3", use_dynamic_shifting=True), with_encoders=False)
    small, large = model.sigmas(sized(4, 16, 16)), model.sigmas(sized(4, 128, 128))
    assert all(a < b for a, b in zip(small[1:-1], large[1:-1], strict=True))


@pytest.mark.parametrize("shift", [1.4975747465217357, 1.7794917250378224, 3.0])
def test_sigmas_fall_from_exactly_one_to_exactly_zero(tmp_path: Path, shift: float) -> None:
    """The first two shifts give 1 - 6e-8 and 1 + 1e-7 in the scheduler's float32."""
    model = load(build_tiny_sd3(tmp_path / "sd3", shift=shift), with_encoders=False)
    sigmas = model.sigmas(replace(SAMPLING, num_inference_steps=10))
    assert len(sigmas) == 11
    assert sigmas[0] == 1.0
    assert sigmas[-1] == 0.0
    assert all(a > b for a, b in pairwise(sigmas))


def test_encoding_equals_the_pipelines_encode_prompt(
    model: StableDiffusion3Model, pipeline: Any
) -> None:
    ours, ours_empty = model.encode(PROMPTS, SAMPLING), model.encode(prompts("", ""), SAMPLING)
    with torch.no_grad():
        embeds, negative, pooled, negative_pooled = pipeline.encode_prompt(
            TEXTS,
            None,
            None,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
        )
    pairs = [
        (ours.prompt_embeds, embeds),
        (ours.pooled, pooled),
        (ours_empty.prompt_embeds, negative),
        (ours_empty.pooled, negative_pooled),
    ]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    assert ours.prompt_embeds.shape[1] == 77 + MAX_SEQUENCE_LENGTH
    assert not ours.prompt_embeds.requires_grad
    assert not ours.prompt_embeds.is_inference()


def test_a_folder_without_t5_encodes_like_the_pipeline_without_t5(folder_without_t5: Path) -> None:
    model = load(folder_without_t5)
    pipeline = load_pipeline(folder_without_t5, text_encoder_3=None, tokenizer_3=None)
    ours = model.encode(PROMPTS, SAMPLING)
    with torch.no_grad():
        embeds, _, pooled, _ = pipeline.encode_prompt(
            TEXTS,
            None,
            None,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
        )
    torch.testing.assert_close(ours.prompt_embeds, embeds, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.pooled, pooled, rtol=0, atol=1e-5)
    assert not ours.prompt_embeds[:, 77:].any(), "zeros stand in for the T5 tokens"
    assert set(model.frozen_modules) == {"text_encoder", "text_encoder_2", "vae"}


def test_conditioning_of_a_batch_is_the_rows_of_its_prompts(model: StableDiffusion3Model) -> None:
    rows = model.encode(PROMPTS, SAMPLING).select(torch.tensor([0, 0, 1]))
    parts = Sd3Conditioning.cat([model.encode([PROMPTS[i]], SAMPLING) for i in (0, 0, 1)])
    torch.testing.assert_close(rows.prompt_embeds, parts.prompt_embeds, rtol=0, atol=1e-5)
    torch.testing.assert_close(rows.pooled, parts.pooled, rtol=0, atol=1e-5)


def test_example_conditioning_has_the_shapes_of_an_encoded_prompt(
    model: StableDiffusion3Model,
) -> None:
    example = model.example_conditioning(2, SAMPLING, torch.Generator().manual_seed(0))
    encoded = model.encode(PROMPTS, SAMPLING)
    assert example.prompt_embeds.shape == encoded.prompt_embeds.shape
    assert example.pooled.shape == encoded.pooled.shape


def test_each_sample_of_a_batch_has_its_own_sigma(model: StableDiffusion3Model) -> None:
    noise, sigma, conditioning = (
        start_noise(model),
        torch.tensor([0.9, 0.1]),
        model.encode(PROMPTS, SAMPLING),
    )
    both = model.velocity(noise, sigma, conditioning)
    second = torch.tensor([1])
    alone = model.velocity(noise[second], sigma[second], conditioning.select(second))
    torch.testing.assert_close(both[second], alone, rtol=0, atol=1e-5)


def test_a_released_network_computes_the_same_once_it_is_refilled(folder: Path) -> None:
    model = load(folder, with_encoders=False)
    conditioning = model.example_conditioning(1, SAMPLING, torch.Generator().manual_seed(0))
    noise, sigma = torch.ones(1, *model.latent_shape(SAMPLING)), torch.tensor([0.5])
    before = model.velocity(noise, sigma, conditioning)
    for parameter in model.network.parameters():
        kept, size = parameter.detach().clone(), parameter.untyped_storage().nbytes()
        parameter.untyped_storage().resize_(0)
        parameter.untyped_storage().resize_(size)
        parameter.data.copy_(kept)
    assert torch.equal(model.velocity(noise, sigma, conditioning), before)


def test_tied_t5_embeddings_stay_tied(model: StableDiffusion3Model) -> None:
    t5 = model.frozen_modules["text_encoder_3"]
    weights = dict(t5.named_parameters(remove_duplicate=False))
    assert weights["shared.weight"] is weights["encoder.embed_tokens.weight"]


def test_fp32_arithmetic_over_bf16_encoders_keeps_the_network_in_float32(
    folder: Path, model: StableDiffusion3Model
) -> None:
    mixed = load(folder, frozen_dtype=torch.bfloat16)
    assert {p.dtype for p in mixed.network.parameters()} == {torch.float32}
    assert {p.dtype for m in mixed.frozen_modules.values() for p in m.parameters()} == {
        torch.bfloat16
    }
    noise, sigma = start_noise(model), torch.tensor([1.0, 0.5])
    conditioning = mixed.encode(PROMPTS, SAMPLING)
    assert conditioning.prompt_embeds.dtype == torch.bfloat16
    assert torch.equal(
        mixed.velocity(noise, sigma, conditioning), model.velocity(noise, sigma, conditioning)
    )


def test_gradients_reach_a_trained_weight_in_bf16_arithmetic(folder: Path) -> None:
    model = load(folder, compute_dtype=torch.bfloat16, with_encoders=False)
    weight = model.network.get_parameter("transformer_blocks.0.attn.to_q.weight")
    weight.requires_grad_(True)
    conditioning = model.example_conditioning(1, SAMPLING, torch.Generator().manual_seed(0))
    noise = torch.ones(1, *model.latent_shape(SAMPLING))
    model.velocity(noise, torch.tensor([0.5]), conditioning).square().mean().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert weight.grad.abs().sum() > 0


@pytest.mark.parametrize("size", [(24, 32), (32, 40), (144, 32)])
def test_a_size_the_network_cannot_take_is_refused(
    model: StableDiffusion3Model, size: tuple[int, int]
) -> None:
    with pytest.raises(ModelError, match=r"sampling\.height.*(multiples of 16|up to 128)"):
        model.latent_shape(sized(NUM_STEPS, *size))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def drop_a_tensor(file: Path) -> None:
    tensors = load_file(file)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, file, metadata={"format": "pt"})


def fill_with_garbage(file: Path) -> None:
    file.write_bytes(b"\x93garbage")


def change_class(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"_class_name": "FluxPipeline"}))


def change_scheduler(file: Path) -> None:
    scheduler = {"scheduler": ["diffusers", "FlowMatchHeunDiscreteScheduler"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | scheduler))


NETWORK = "transformer/diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize(
    ("damage", "relative", "named"),
    [
        (shutil.rmtree, "transformer", "component transformer is missing"),
        (shutil.rmtree, "vae", "component vae is missing"),
        (shutil.rmtree, "scheduler", "component scheduler is missing"),
        (shutil.rmtree, "tokenizer_2", "component tokenizer_2 is missing"),
        (shutil.rmtree, "text_encoder_3", "component text_encoder_3 is missing"),
        (Path.unlink, NETWORK, "component transformer cannot be read"),
        (truncate, NETWORK, "component transformer cannot be read"),
        (fill_with_garbage, NETWORK, "component transformer cannot be read"),
        (drop_a_tensor, NETWORK, "component transformer cannot be read.*lack"),
        (Path.unlink, "text_encoder/config.json", "text_encoder cannot be read.*no config"),
        (truncate, "text_encoder/model.safetensors", "component text_encoder cannot be read"),
        (drop_a_tensor, "text_encoder_3/model.safetensors", "text_encoder_3 cannot be read.*lack"),
        (truncate, "vae/diffusion_pytorch_model.safetensors", "component vae cannot be read"),
        (fill_with_garbage, "scheduler/scheduler_config.json", "component scheduler cannot be"),
        (
            Path.unlink,
            "tokenizer/tokenizer.json",
            "tokenizer cannot be read.*no tokenizer.json",
        ),
        (truncate, "tokenizer_3/tokenizer.json", "component tokenizer_3 cannot be read"),
        (Path.unlink, "model_index.json", "not a diffusers folder"),
        (fill_with_garbage, "model_index.json", "not a diffusers model index"),
        (change_class, "model_index.json", "found FluxPipeline"),
        (change_scheduler, "model_index.json", "with FlowMatchHeunDiscreteScheduler"),
    ],
)
def test_a_damaged_folder_is_an_error_that_names_path_and_component(
    folder: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    relative: str,
    named: str,
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    damage(copy / relative)
    with pytest.raises(ModelError, match=named) as raised:
        load(copy)
    assert str(copy) in str(raised.value)


def test_loading_opens_no_connection(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("loading a local folder must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    load(folder)
    with pytest.raises(ModelError, match="not a diffusers folder"):
        load(tmp_path / "stabilityai" / "stable-diffusion-3.5-medium")
