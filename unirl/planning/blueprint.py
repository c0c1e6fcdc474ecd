"""The model of a recipe without its weights: every tensor on the meta device, at no cost.

In goes a recipe; out comes its model with the adapter attached, or all weights trainable, exactly
as a run has it. Shapes come from the folder of model.path where it exists, otherwise from the
published configuration files that ship under the name model.release.

    blueprint = blueprint_model(config, with_encoders=True)
    sum(p.nbytes for p in blueprint.model.network.parameters())
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.config import catalog
from unirl.config.components import import_component, is_own
from unirl.config.resources import RELEASES, release_names, resolve_path
from unirl.config.schema import RunConfig
from unirl.core.errors import ConfigError
from unirl.models.base import DiffusionModel
from unirl.models.stored_encodings import EncodedBefore, ExampleEncodings
from unirl.models.trainable import load_settings, make_trainable

ORIGIN = "_unirl_origin"
"""In the index of a release whose sizes are not from published files: where they are from."""


@dataclass(frozen=True)
class Blueprint:
    """A model on the meta device, trainable as in the run."""

    model: DiffusionModel
    source: str
    """Where its shapes come from, for the reader of a plan."""
    block_classes: tuple[str, ...]
    """Class names of the network's blocks."""


@dataclass(frozen=True)
class _Shapes:
    """Where the shapes are and who reads them."""

    folder: Path
    source: str
    model_class: type[DiffusionModel]
    lora_targets: Sequence[str]
    block_classes: Sequence[str]


def blueprint_model(config: RunConfig, with_encoders: bool) -> Blueprint:
    """The recipe's model on meta.

    Raises ConfigError when neither model.path exists nor model.release names published
    configurations, and ModelError for a folder that cannot be read.
    """
    shapes = _shapes(config)
    model = shapes.model_class.blueprint(shapes.folder, load_settings(config, with_encoders))
    if config.model.encodings is not None and with_encoders:
        model = EncodedBefore(model, ExampleEncodings(model))
    make_trainable(_with_targets(config, shapes.lora_targets), model)
    classes = config.backend.block_classes or shapes.block_classes
    return Blueprint(model, shapes.source, tuple(classes))


def _shapes(config: RunConfig) -> _Shapes:
    path, release = resolve_path(config.model.path), config.model.release
    if config.model.path and path.exists():
        kind = "folder" if path.is_dir() else "file"
        return _trainable(config.model.family, path, f"the {kind} {config.model.path}")
    if release is None:
        raise ConfigError(
            f"model.path={config.model.path!r} does not exist and model.release is null, so the "
            "model's sizes are not known. Set model.path to the model, or model.release to one of: "
            f"{', '.join(release_names())}."
        )
    folder, own = RELEASES / release, config.model.family
    index = _index(folder)
    # The release decides, not model.family.
    family = own if is_own(own) else _reader(index["_class_name"])
    origin = index.get(ORIGIN)
    source = f"configs of {release} ({origin})" if origin else f"published configs of {release}"
    if config.model.path:
        source += f", since model.path={config.model.path} is not on this machine"
    return _trainable(family, folder, source)


def _index(folder: Path) -> Mapping[str, Any]:
    from unirl.models.diffusers_folder import index_file  # imports diffusers

    return json.loads(index_file(folder).read_text())


def _reader(pipeline: str) -> str:
    """The built-in family that reads folders of this pipeline."""
    return next(family for family, entry in catalog.MODELS.items() if pipeline in entry.pipelines)


def _trainable(name: str, folder: Path, source: str) -> _Shapes:
    """Shapes that the model family `name` reads."""
    if is_own(name):  # such a recipe names its LoRA targets and blocks itself
        return _Shapes(folder, source, import_component(name), (), ())
    entry = catalog.MODELS[name]
    model_class = import_component(entry.path)
    return _Shapes(folder, source, model_class, entry.lora_targets, entry.block_classes)


def _with_targets(config: RunConfig, targets: Sequence[str]) -> RunConfig:
    """The recipe with its adapter's layers spelled out."""
    lora = config.stack.lora
    if lora is None or lora.target_modules is not None:
        return config
    named = lora.model_copy(update={"target_modules": list(targets)})
    return config.model_copy(update={"stack": config.stack.model_copy(update={"lora": named})})
