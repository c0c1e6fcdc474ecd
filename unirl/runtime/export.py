"""A checkpoint as files that other programs load: a LoRA adapter, or the whole model.

In goes a checkpoint of any run; its own configuration says which model it belongs to. Out come
files in a folder of their own. What was written is read back and compared before it is called done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from unirl.checkpoint.finding import find_checkpoint
from unirl.checkpoint.state import NO_SHADOW, read_trainer_state, read_weights
from unirl.config.schema import RunConfig
from unirl.core.errors import CheckpointError, ModelError
from unirl.models.base import DiffusionModel
from unirl.models.lora import adapter_parameters
from unirl.models.parameters import copy_into
from unirl.runtime.training_model import build_model
from unirl.trainer.requests import training_params

CPU = torch.device("cpu")
ADAPTER, MODEL = "adapter", "model"


@dataclass(frozen=True)
class Export:
    """What was written."""

    checkpoint: Path
    kind: str
    """`adapter` or `model`."""
    path: Path
    """The file, or the folder of a whole model."""
    files: tuple[Path, ...]
    """All that was written."""
    num_bytes: int
    largest_difference: float
    """Of velocities, between the trained weights and those read back from `path`; 0 is bit equal.
    NaN for an adapter, whose file is compared tensor by tensor."""


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    *,
    kind: str | None = None,
    model_path: str | None = None,
    shadow: str | None = None,
) -> Export:
    """Write a checkpoint's weights into the folder `output`, which must be empty or new.

    kind: `adapter` or `model` (the adapter merged in); None takes the adapter where there is one.
    model_path: where the base model is now, if not where the run had it.
    shadow: export these shadow weights instead, e.g. `old` of DiffusionNFT; None and `none` take
        the trained ones.

    Raises CheckpointError for an unreadable checkpoint and ModelError for a model that has no such
    format.
    """
    require_empty(output)
    folder = find_checkpoint(checkpoint, key=None)
    config = saved_config(folder)
    if model_path is not None:
        config = _at(config, Path(model_path))
    kind = kind or (MODEL if config.stack.lora is None else ADAPTER)
    if kind == ADAPTER and config.stack.lora is None:
        raise ModelError(f"{folder} was trained with stack.lora=null: export it with --as model.")
    if kind == MODEL:  # an adapter is merged into exact weights, whatever it learned on
        config = exact(config)
    model = build_model(config, CPU, with_encoders=False)
    load_trained(model, read_weights(folder, None if shadow == NO_SHADOW else shadow))
    if kind == ADAPTER:
        path = model.write_adapter(output)
        return Export(folder, kind, path, *_written(output), float("nan"))
    probe = _probe(config, model)
    path = model.write_model(output)
    difference = _difference(probe, _probe(_at(config, path), None))
    return Export(folder, kind, path, *_written(output), difference)


def require_empty(folder: Path) -> None:
    """Raise CheckpointError unless `folder` is new or has nothing in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not empty. Name another folder.")


def load_trained(model: DiffusionModel, tensors: Mapping[str, Tensor]) -> None:
    """Put a checkpoint's weights in place: the adapter's, or all of the network's.

    Raises ModelError when they do not fit.
    """
    parameters = dict(model.network.named_parameters())
    adapter = adapter_parameters(model.network)
    copy_into(adapter if adapter.keys() == tensors.keys() else parameters, tensors)


def exact(config: RunConfig) -> RunConfig:
    """The same run with weights that are not quantised."""
    model = config.model.model_copy(update={"quantization": None})
    return config.model_copy(update={"model": model})


def saved_config(folder: Path) -> RunConfig:
    """Of the run that saved a verified checkpoint folder."""
    saved = read_trainer_state(folder).config
    try:
        return RunConfig.model_validate(saved)
    except ValidationError as error:
        raise CheckpointError(
            f"{folder} was saved with a configuration that this version does not read: {error}"
        ) from error


def _at(config: RunConfig, path: Path) -> RunConfig:
    """The same run with the model at `path`."""
    model = config.model.model_copy(update={"path": str(path)})
    return config.model_copy(update={"model": model})


def _probe(config: RunConfig, model: DiffusionModel | None) -> Tensor:
    """A velocity of the model, or of the one at the config's path as it is there."""
    if model is None:
        stack = config.stack.model_copy(update={"lora": None})
        model = build_model(config.model_copy(update={"stack": stack}), CPU, with_encoders=False)
    sampling = training_params(config)
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, *model.latent_shape(sampling), generator=generator)
    conditioning = model.example_conditioning(1, sampling, generator)
    with torch.no_grad():
        return model.velocity(latents, torch.tensor([0.7]), conditioning)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


def _written(folder: Path) -> tuple[tuple[Path, ...], int]:
    """All files of a folder, and their bytes."""
    files = tuple(sorted(file for file in folder.rglob("*") if file.is_file()))
    return files, sum(file.stat().st_size for file in files)
