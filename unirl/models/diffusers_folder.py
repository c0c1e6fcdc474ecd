"""A model repository in diffusers' layout, read component by component.

In goes a local folder with `model_index.json` and what a family expects in it; out come its
components, real or on the meta device. Nothing is fetched from the network and no pickle is read.
Every failure is a ModelError that names the folder and the component.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import init_empty_weights
from transformers import PreTrainedTokenizerBase
from transformers import PreTrainedTokenizerFast as RulesInFile

from unirl.core.errors import ModelError
from unirl.memory.movers import own_storages
from unirl.models.base import Frozen, LoadSettings
from unirl.models.on_meta import BlankTokenizer, cast_as_loaded, module_on_meta
from unirl.models.quantized import as_int8, loading_words

T = TypeVar("T")

SCHEDULER = "scheduler"
WEIGHTS = "diffusion_pytorch_model.safetensors"
"""What diffusers reads, or the files that its `.index.json` names."""


@dataclass(frozen=True)
class PipelineParts:
    """What a family's folder holds. Classes are those of diffusers and transformers (Any)."""

    family: str
    """For messages."""
    pipelines: Mapping[str, Any]
    """Accepted `_class_name` of model_index.json -> pipeline class."""
    networks: Mapping[str, Any]
    """The denoising networks, which are trained: component name -> class."""
    modules: Mapping[str, Any]
    """Text encoders and decoder, which stay as they are."""
    processors: Mapping[str, Any]
    """Tokenizers and image processors."""
    schedulers: Mapping[str, Any]
    """Accepted scheduler class names -> class."""
    decoders: Collection[str] = ("vae",)
    """Those of the modules that turn latents into pixels."""
    optional: Collection[str] = field(default=())
    """Components that the index may name [null, null] or leave out."""
    blank: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Processors of a folder without vocabularies, for plans; a BlankTokenizer where not given."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the pipeline whatever the folder says: None for components that are not read."""


class DiffusersFolder:
    """One folder, checked against the parts a family expects."""

    def __init__(self, path: Path, parts: PipelineParts) -> None:
        self.path = path
        self.parts = parts
        self.index = _read_index(path, parts)

    @property
    def pipeline_class(self) -> Any:
        return self.parts.pipelines[self.index["_class_name"]]

    @property
    def settings(self) -> dict[str, Any]:
        """What model_index.json says beside its components: keyword arguments of the pipeline."""
        found = {
            name: value
            for name, value in self.index.items()
            if not name.startswith("_") and not isinstance(value, list)
        }
        return {**found, **self.parts.fixed}

    def has(self, name: str) -> bool:
        """Whether an optional component is there."""
        entry = self.index.get(name)
        return name not in self.parts.optional or (entry is not None and entry[0] is not None)

    @property
    def network_names(self) -> list[str]:
        """The denoising networks that are there."""
        return [name for name in self.parts.networks if self.has(name)]

    def network(self, name: str, settings: LoadSettings) -> Any:
        words = loading_words(settings.quantization)
        return self._read(
            name,
            lambda folder: _module(
                folder, self.parts.networks[name], settings.network_dtype, **words
            ),
        )

    def network_skeleton(self, name: str, dtype: torch.dtype) -> Any:
        """Parameters on the meta device, buffers real."""
        return self._read(name, lambda folder: _skeleton(folder, self.parts.networks[name], dtype))

    def network_on_meta(self, name: str, settings: LoadSettings) -> Any:
        network_class, dtype = self.parts.networks[name], settings.network_dtype
        network = self._read(name, lambda folder: module_on_meta(folder, network_class, dtype))
        return network if settings.quantization is None else as_int8(network)

    def network_files(self, name: str) -> Sequence[Path]:
        """Those that `network` reads: the folder may hold variants in other precisions too."""
        index = self.path / name / f"{WEIGHTS}.index.json"
        if not index.is_file():
            return [self.path / name / WEIGHTS]
        named = json.loads(index.read_text())["weight_map"].values()
        return [self.path / name / file for file in sorted(set(named))]

    def frozen(self, which: Frozen, dtype: torch.dtype) -> dict[str, Any] | None:
        """Encoders, decoder and processors under the names the pipeline takes, None for those that
        are absent or not asked for; None where none is."""
        return self._frozen(which, lambda folder, c: _module(folder, c, dtype), self._processor)

    def frozen_on_meta(self, which: Frozen, dtype: torch.dtype) -> dict[str, Any] | None:
        """Like `frozen`, from config files alone; processors stand in for those with words."""
        return self._frozen(which, lambda folder, c: module_on_meta(folder, c, dtype), self._blank)

    def _frozen(
        self,
        which: Frozen,
        read: Callable[[Path, Any], Any],
        processor: Callable[[str], Any],
    ) -> dict[str, Any] | None:
        if which is Frozen.NONE:
            return None
        components: dict[str, Any] = {}
        for name, module_class in self.parts.modules.items():
            wanted = which is Frozen.ALL or name in self.parts.decoders
            if wanted and self.has(name):
                components[name] = self._read(name, lambda folder, c=module_class: read(folder, c))
            else:
                components[name] = None
        for name in self.parts.processors:
            wanted = which is Frozen.ALL and self.has(name)
            components[name] = processor(name) if wanted else None
        return components

    def _processor(self, name: str) -> Any:
        return self._read(name, lambda folder: _processor(folder, self.parts.processors[name]))

    def _blank(self, name: str) -> Any:
        return self.parts.blank.get(name, BlankTokenizer)()

    def scheduler(self) -> Any:
        scheduler_class = self.parts.schedulers[self.index[SCHEDULER][1]]
        return self._read(
            SCHEDULER, lambda folder: scheduler_class.from_pretrained(folder, local_files_only=True)
        )

    def config(self, name: str, file: str = "config.json") -> Mapping[str, Any]:
        """A component's configuration."""
        return self._read(name, lambda folder: json.loads((folder / file).read_text()))

    def _read(self, name: str, reader: Callable[[Path], T]) -> T:
        """reader(path / name), every failure told as a ModelError."""
        folder = self.path / name
        if not folder.is_dir():
            optional = sorted(self.parts.optional)
            allowed = (
                f"; only {', '.join(optional)} may be left out, by naming them [null, null] in "
                "model_index.json"
                if optional
                else ""
            )
            raise ModelError(
                f"model.path={self.path}: component {name} is missing (no folder {folder}). "
                f"Complete the folder{allowed}."
            )
        try:
            return reader(folder)
        # The libraries raise OSError, ValueError, RuntimeError, SafetensorError and more.
        except Exception as error:
            raise ModelError(
                f"model.path={self.path}: component {name} cannot be read. Fetch or copy {folder} "
                f"again. The reader said: {error}"
            ) from error


def index_file(folder: Path) -> Path:
    """Where a folder names its components; those of modular pipelines have another name for it."""
    modular = folder / "modular_model_index.json"
    return modular if modular.is_file() else folder / "model_index.json"


def _read_index(path: Path, parts: PipelineParts) -> Mapping[str, Any]:
    """model_index.json of a folder that this family reads."""
    file = index_file(path)
    if not file.is_file():
        raise ModelError(
            f"model.path={path} is not a diffusers folder: it has no model_index.json. Set "
            f"model.path to a folder made by {next(iter(parts.pipelines))}.save_pretrained or a "
            "downloaded copy of the model repository."
        )
    try:
        index = json.loads(file.read_text())
        pipeline, scheduler = index["_class_name"], index[SCHEDULER][1]
    except (ValueError, LookupError, TypeError) as error:
        raise ModelError(f"{file} is not a diffusers model index: {error!r}.") from error
    if pipeline not in parts.pipelines or scheduler not in parts.schedulers:
        raise ModelError(
            f"model.path={path}: model.family={parts.family} reads {' or '.join(parts.pipelines)} "
            f"with {' or '.join(parts.schedulers)}, found {pipeline} with {scheduler}. Set "
            "model.path or model.family."
        )
    return index


def _module(folder: Path, module_class: Any, dtype: torch.dtype, **words: Any) -> Any:
    """A frozen module in eval mode that owns its memory."""
    # Without the file transformers would quietly take its default architecture.
    if not (folder / "config.json").is_file():
        raise FileNotFoundError("no config.json.")
    module, info = module_class.from_pretrained(
        folder,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
        **words,
    )
    # The libraries would go on with random values in their place.
    if info["missing_keys"]:
        raise ValueError(f"the weights lack {sorted(info['missing_keys'])[:4]}.")
    own_storages(module)
    return module.eval().requires_grad_(False)


def _skeleton(folder: Path, network_class: Any, dtype: torch.dtype) -> Any:
    config = network_class.load_config(folder, local_files_only=True)
    with init_empty_weights(include_buffers=False):
        network = network_class.from_config(config)
    return cast_as_loaded(network, dtype).eval().requires_grad_(False)


def _processor(folder: Path, processor_class: Any) -> Any:
    if issubclass(processor_class, PreTrainedTokenizerBase):
        return read_tokenizer(folder, processor_class)
    return processor_class.from_pretrained(folder, local_files_only=True)


def read_tokenizer(folder: Path, tokenizer_class: Any) -> Any:
    """With its vocabulary: without files transformers returns an empty one.

    `RulesInFile` where transformers' class for the architecture has rules of its own that are not
    those of the release's tokenizer.json.
    """
    files = dict(tokenizer_class.vocab_files_names)
    if "tokenizer_file" in files:  # ByT5 reads bytes and has none
        complete = folder / files.pop("tokenizer_file")
        parts = [name for name in files.values() if tokenizer_class is not RulesInFile]
        if not complete.is_file() and not (parts and all((folder / f).is_file() for f in parts)):
            others = f", nor {' and '.join(parts)}" if parts else ""
            raise FileNotFoundError(f"the folder has no {complete.name}{others}.")
    return tokenizer_class.from_pretrained(folder, local_files_only=True)
