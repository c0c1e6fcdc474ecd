"""A blueprint has every tensor of the loaded model, under its name, in its shape and dtype."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from builders import sampling_params
from families.sd3 import build_tiny_sd3
from torch import nn

from unirl.cli.compose import compose
from unirl.config.resources import resolve_path
from unirl.config.schema import RunConfig
from unirl.core.errors import ConfigError, ModelError
from unirl.models.base import DiffusionModel
from unirl.models.sd3 import StableDiffusion3Model
from unirl.models.tiny import TinyModel
from unirl.models.trainable import load_settings, make_trainable
from unirl.planning.blueprint import blueprint_model

SAMPLING = sampling_params(num_steps=7, height=64, width=64)


def layout(module: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype, bool]]:
    parameters = {n: (p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters()}
    return parameters | {n: (b.shape, b.dtype, False) for n, b in module.named_buffers()}


def layouts(model: DiffusionModel) -> dict[str, dict[str, tuple[torch.Size, torch.dtype, bool]]]:
    modules = {"network": model.network, **model.frozen_modules}
    return {name: layout(module) for name, module in modules.items()}


def loaded(config: RunConfig, family: type[DiffusionModel]) -> DiffusionModel:
    model = family.load(resolve_path(config.model.path), load_settings(config, with_encoders=True))
    make_trainable(config, model)
    return model


@pytest.mark.parametrize("keys", [(), ("stack.lora=null",)], ids=["lora", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("with_t5", [True, False], ids=["t5", "no-t5"])
def test_sd3_from_config_files_alone_is_laid_out_as_loaded(
    tmp_path: Path, keys: tuple[str, ...], precision: str, with_t5: bool
) -> None:
    folder = build_tiny_sd3(tmp_path / "sd3", with_t5=with_t5)
    config = compose(
        "diffusion/sd3/sd3_trainside",
        [f"model.path={folder}", f"model.precision={precision}", *keys],
    )
    real = loaded(config, StableDiffusion3Model)
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    for tokenizer in folder.glob("tokenizer*"):
        shutil.rmtree(tokenizer)
    blueprint = blueprint_model(config, with_encoders=True)
    assert layouts(blueprint.model) == layouts(real)
    assert all(p.is_meta for p in blueprint.model.network.parameters())
    assert blueprint.model.sigmas(SAMPLING) == real.sigmas(SAMPLING)
    assert blueprint.model.latent_shape(SAMPLING) == real.latent_shape(SAMPLING)
    assert blueprint.source == f"the folder {folder}"


def test_tiny_is_laid_out_as_loaded() -> None:
    config = compose("diffusion/tiny/tiny_replica_lora", [])
    blueprint = blueprint_model(config, with_encoders=True)
    assert layouts(blueprint.model) == layouts(loaded(config, TinyModel))
    assert blueprint.source == "the file pkg:tiny/model.safetensors"
    assert blueprint.block_classes == ("Block",)


class OwnModel(TinyModel):
    """A family whose author wrote no blueprint."""

    blueprint = classmethod(DiffusionModel.blueprint.__func__)  # type: ignore[attr-defined]


def test_a_family_without_a_blueprint_is_read_and_emptied() -> None:
    settings = load_settings(compose("diffusion/tiny/tiny_replica_lora", []), with_encoders=True)
    model = OwnModel.blueprint(resolve_path("pkg:tiny/model.safetensors"), settings)
    assert all(p.is_meta for p in model.network.parameters())


def test_sizes_that_are_known_nowhere_are_asked_for() -> None:
    config = compose("diffusion/tiny/tiny_replica_lora", [])
    lost = config.model.model_copy(update={"path": "/nowhere", "release": None})
    with pytest.raises(ConfigError, match=r"model\.path='/nowhere' does not exist.*sd3\.5-medium"):
        blueprint_model(config.model_copy(update={"model": lost}), with_encoders=False)


def test_a_component_without_its_config_is_named(tmp_path: Path) -> None:
    folder = build_tiny_sd3(tmp_path / "sd3")
    (folder / "text_encoder_2" / "config.json").unlink()
    config = compose("diffusion/sd3/sd3_trainside", [f"model.path={folder}"])
    with pytest.raises(ModelError, match=r"text_encoder_2 cannot be read.*no config\.json"):
        blueprint_model(config, with_encoders=True)
