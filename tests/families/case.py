"""What the proofs of `test_family_proofs.py` need to know about one family."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unirl.config.catalog import MODELS
from unirl.config.components import import_component
from unirl.core.types import PromptRecord, SamplingParams
from unirl.models.base import DiffusionModel, Frozen, LoadSettings


class PipelineCall(Protocol):
    """The pipeline's own `__call__`."""

    def __call__(
        self,
        pipeline: Any,
        prompts: Sequence[PromptRecord],
        sampling: SamplingParams,
        noise: Tensor,
        output_type: str,
    ) -> Any:
        """noise [B, *latent] in our layout. "latent": the clean latents [B, *latent] in our layout;
        "pil" (of videos "np"): uint8 [B, 3, H, W], of videos [B, F, 3, H, W]."""
        ...


def load_lora_weights(pipeline: Any, folder: Path) -> None:
    """An exported adapter into the pipeline, as most pipelines take it."""
    pipeline.load_lora_weights(folder)


@dataclass(frozen=True)
class FamilyCase:
    """One model of one family."""

    name: str
    """For the test's id."""
    family: str
    """In `catalog.MODELS`."""
    build: Callable[[Path], Path]
    """Writes the folder of random weights and returns it."""
    call: PipelineCall
    sampling: SamplingParams
    """Non-square, few steps, eta 0; its solver is the deployed one."""
    prompts: Sequence[PromptRecord]
    """Two of different lengths."""
    guidance_scales: Sequence[float]
    """With and without guidance, where the family has both."""
    open_pipeline: Callable[[Path], Any] | None = None
    """Reads a folder that is not a DiffusionPipeline's."""
    max_sequence_length: int = 24
    tolerance: float = 1e-5
    """Of latents. The operations are the same in the same order on values of size 1; only the
    alignment of the weights in memory may change the last bits. Say why where it is larger."""
    lowest_start: float = 0.99
    """What the first noise level is at least, for every number of steps from 2 on. Below 1 in
    families whose schedule comes from timesteps they were trained on."""
    load_adapter: Callable[[Any, Path], None] = load_lora_weights
    """Loads an exported adapter into the pipeline."""
    tiled: tuple[str, ...] = ()
    """Decoders that the deployed pipeline tiles as well."""
    untrained: tuple[str, ...] = ()
    """Parameters that no forward uses, by the end of their name."""
    idle_targets: tuple[str, ...] = ()
    """Adapter targets whose output the network throws away, by the end of their name."""

    patched: Mapping[str, Any] = field(default_factory=dict)
    """What dotted names are while the proofs run: constants of pipelines that would make them slow,
    and classes that need packages which the tests do without."""

    @property
    def model_class(self) -> type[DiffusionModel]:
        return import_component(MODELS[self.family].path)

    def settings(
        self, dtype: torch.dtype = torch.float32, *, encoders: bool = True
    ) -> LoadSettings:
        return LoadSettings(
            frozen_dtype=dtype,
            compute_dtype=dtype,
            max_sequence_length=self.max_sequence_length,
            frozen=Frozen.ALL if encoders else Frozen.NONE,
        )

    def load(
        self, folder: Path, dtype: torch.dtype = torch.float32, *, encoders: bool = True
    ) -> DiffusionModel:
        return self.model_class.load(folder, self.settings(dtype, encoders=encoders))

    def pipeline(self, folder: Path) -> Any:
        """diffusers' own."""
        if self.open_pipeline is not None:
            return self.open_pipeline(folder)
        from diffusers import DiffusionPipeline

        pipeline: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def picture_file(name: str, width: int, height: int) -> str:
    """A PNG of blocks of colour that depend on the name; it lasts as long as the process."""
    values = np.random.default_rng([ord(c) for c in name]).integers(0, 256, (4, 4, 3))
    path = Path(_PICTURES.name) / f"{name}.png"
    blocks = Image.fromarray(values.astype(np.uint8))
    blocks.resize((width, height), Image.Resampling.NEAREST).save(path)
    return str(path)


_PICTURES = TemporaryDirectory()


def uint8_of(pictures: Sequence[Any]) -> Tensor:
    """[B, 3, H, W] of PIL images."""
    return torch.stack([torch.from_numpy(np.array(p)).permute(2, 0, 1) for p in pictures])


def uint8_of_videos(videos: Any) -> Tensor:
    """[B, F, 3, H, W] of float arrays [B, F, H, W, 3] in [0, 1]."""
    frames = torch.from_numpy(np.asarray(videos)).permute(0, 1, 4, 2, 3)
    return (frames * 255).round().to(torch.uint8)


def all_cases() -> list[FamilyCase]:
    """Of every module of this package that has some."""
    import families

    modules = [name for _, name, _ in pkgutil.iter_modules(families.__path__) if name != "case"]
    found = [importlib.import_module(f"families.{name}") for name in sorted(modules)]
    return [case for module in found for case in module.CASES]
