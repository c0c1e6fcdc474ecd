"""What a family's encoders say about prompts, kept on disk so that a run needs no encoders.

`EncodingStore` is a folder with one safetensors file per prompt, named after everything that
decides its contents: the encoders' files, their precision, the prompt with its images and how it is
sampled. `EncodedBefore` is a model whose `encode` looks there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol, Self

import diffusers
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import unirl
from unirl.config.components import import_component
from unirl.core.errors import ModelError
from unirl.core.fingerprint import ends_digest
from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.base import DiffusionModel, LoadSettings
from unirl.models.diffusers_folder import index_file
from unirl.tracking.files import replacing

NOTHING = "nothing"
"""In place of a class name: guidance leads away from nothing."""


class EncodingStore:
    """A folder of encodings by the encoders of one model, at one precision."""

    def __init__(self, folder: Path, model: Path, family: str, settings: LoadSettings) -> None:
        """model: the folder whose components encode."""
        self._folder = folder
        self._encoders = {
            "family": family,
            "files": _fingerprint(model),
            "dtype": str(settings.frozen_dtype),
            "max_sequence_length": settings.max_sequence_length,
            # Templates around prompts are code.
            "code": [unirl.__version__, diffusers.__version__, transformers.__version__],
        }

    def has(self, prompt: PromptRecord, sampling: SamplingParams, *, negative: bool) -> bool:
        return self.file(prompt, sampling, negative).is_file()

    def write(
        self,
        prompt: PromptRecord,
        sampling: SamplingParams,
        encoding: Conditioning | None,
        *,
        negative: bool,
    ) -> None:
        """encoding: [1, ...] of the prompt; None where guidance leads away from nothing."""
        tensors = {} if encoding is None else {f.name: v for f, v in _fields(encoding)}
        name = NOTHING if encoding is None else _class_name(type(encoding))
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with replacing(self.file(prompt, sampling, negative)) as temporary:
            save_file(held, temporary, metadata={"class": name})

    def read(
        self, prompt: PromptRecord, sampling: SamplingParams, *, negative: bool
    ) -> Conditioning | None:
        """As it was written. Raises ModelError when it is not there or cannot be read."""
        file = self.file(prompt, sampling, negative)
        try:
            with safe_open(file, framework="pt") as opened:
                name = (opened.metadata() or {})["class"]
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError) as error:
            raise ModelError(
                f"model.encodings={self._folder}: what the encoders said about prompt "
                f"{prompt.text!r} cannot be read from {file.name}: {error}. Remove the file, and "
                "the next run encodes the prompt again."
            ) from error
        return None if name == NOTHING else import_component(name)(**tensors)

    def file(self, prompt: PromptRecord, sampling: SamplingParams, negative: bool) -> Path:
        """Where it is kept. Negative encodings do not depend on the text, so prompts share them."""
        decides = {
            **self._encoders,
            "text": None if negative else prompt.text,
            "images": [_sha256(Path(image)) for image in prompt.images],
            "sampling": _told_to_encoders(sampling),
        }
        digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
        return self._folder / digest[:2] / f"{digest}.safetensors"


def missing(
    store: EncodingStore, prompts: Sequence[PromptRecord], samplings: Sequence[SamplingParams]
) -> list[tuple[PromptRecord, SamplingParams, bool]]:
    """(prompt, sampling, is negative) of what the store lacks."""
    wanted = [(p, s, negative) for s in samplings for p in prompts for negative in (False, True)]
    lacking = {
        store.file(prompt, sampling, negative): (prompt, sampling, negative)
        for prompt, sampling, negative in wanted
        if not store.has(prompt, sampling, negative=negative)
    }
    return list(lacking.values())


@torch.no_grad()
def fill(
    store: EncodingStore,
    encoder: DiffusionModel,
    lacking: Sequence[tuple[PromptRecord, SamplingParams, bool]],
) -> None:
    """Encode and write them, one prompt at a time: its encoding never depends on others."""
    for prompt, sampling, negative in lacking:
        encode = encoder.encode_negative if negative else encoder.encode
        store.write(prompt, sampling, encode([prompt], sampling), negative=negative)


class Encodings(Protocol):
    """Where a model without encoders finds what it needs."""

    def read(
        self, prompt: PromptRecord, sampling: SamplingParams, *, negative: bool
    ) -> Conditioning | None: ...


class ExampleEncodings:
    """Random ones in the right shapes, for plans."""

    def __init__(self, model: DiffusionModel) -> None:
        self._model = model

    def read(
        self, prompt: PromptRecord, sampling: SamplingParams, *, negative: bool
    ) -> Conditioning | None:
        if negative and not self._model.needs_negative(sampling):
            return None
        return self._model.example_conditioning(1, sampling, torch.Generator())


class EncodedBefore(DiffusionModel):
    """A model without encoders, which finds the encodings of its prompts elsewhere."""

    def __init__(self, model: DiffusionModel, encodings: Encodings) -> None:
        self._model = model
        self._encodings = encodings

    @classmethod
    def load(cls, path: Path, settings: LoadSettings) -> Self:
        raise ModelError("stored encodings belong to a model that was loaded.")

    def encode(self, prompts: Sequence[PromptRecord], sampling: SamplingParams) -> Conditioning:
        found = [self._encodings.read(prompt, sampling, negative=False) for prompt in prompts]
        present = [encoding for encoding in found if encoding is not None]
        return type(present[0]).cat(present).to(self._device)

    def encode_negative(
        self, prompts: Sequence[PromptRecord], sampling: SamplingParams
    ) -> Conditioning | None:
        found = [self._encodings.read(prompt, sampling, negative=True) for prompt in prompts]
        present = [encoding for encoding in found if encoding is not None]
        return type(present[0]).cat(present).to(self._device) if present else None

    @property
    def _device(self) -> torch.device:
        return next(self._model.network.parameters()).device

    # All else is the model's own.

    @property
    def network(self) -> nn.Module:
        return self._model.network

    @property
    def frozen_modules(self) -> Mapping[str, nn.Module]:
        return self._model.frozen_modules

    @property
    def trained_components(self) -> Mapping[str, nn.Module]:
        return self._model.trained_components

    def network_files(self) -> Mapping[str, Sequence[Path]]:
        return self._model.network_files()

    def needs_negative(self, sampling: SamplingParams) -> bool:
        return self._model.needs_negative(sampling)

    def check_prompts(self, prompts: Sequence[PromptRecord], key: str) -> None:
        self._model.check_prompts(prompts, key)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return self._model.velocity(latents, sigma, conditioning)

    def guided_velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        sampling: SamplingParams,
    ) -> Tensor:
        return self._model.guided_velocity(latents, sigma, conditioning, negative, sampling)

    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        return self._model.pixels(latents, sampling)

    def decode(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        return self._model.decode(latents, sampling)

    def latents_of(self, images: Tensor) -> Tensor:
        return self._model.latents_of(images)

    def latent_shape(self, sampling: SamplingParams) -> tuple[int, ...]:
        return self._model.latent_shape(sampling)

    def sigmas(self, sampling: SamplingParams) -> tuple[float, ...]:
        return self._model.sigmas(sampling)

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> Conditioning:
        return self._model.example_conditioning(batch, sampling, generator)


def _fields(encoding: Conditioning) -> list[tuple[Any, Tensor]]:
    return [(f, getattr(encoding, f.name)) for f in fields(encoding)]  # type: ignore[arg-type]


def _class_name(conditioning: type[Conditioning]) -> str:
    return f"{conditioning.__module__}:{conditioning.__qualname__}"


def _told_to_encoders(sampling: SamplingParams) -> dict[str, Any]:
    """What of sampling an encoding can depend on: embedded guidance, and the size that condition
    images are fitted to. Not the steps."""
    known = asdict(sampling)
    names = ("guidance_scale", "low_noise_guidance_scale", "height", "width", "num_frames")
    return {name: known[name] for name in names}


def _fingerprint(model: Path) -> dict[str, str]:
    """Of the files of a model folder beside its denoising network: configs whole, of larger files
    their size, beginning and end. Does not change when the folder is copied. At the top of the
    folder the pipeline's index counts, which says how some families encode."""
    index = index_file(model)
    within = (file for file in model.rglob("*") if file.parent != model or file == index)
    found = sorted(file for file in within if file.is_file())
    names = {file: file.relative_to(model) for file in found}
    # Also what a download leaves beside the model, in hidden folders.
    others = ("transformer", "unet", "scheduler", ".")
    kept = {f: name for f, name in names.items() if not name.parts[0].startswith(others)}
    return {name.as_posix(): ends_digest(file) for file, name in kept.items()}


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
