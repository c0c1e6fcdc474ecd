"""What families that come from a diffusers folder share: reading it, and where its parts are.

A family names its parts, and says how prompts are encoded, what the velocity is and how latents
are decoded, with its pipeline's own methods wherever those can be called alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from unirl.core.errors import ModelError
from unirl.core.types import SamplingParams
from unirl.models.base import DiffusionModel, LoadSettings
from unirl.models.diffusers_folder import DiffusersFolder, PipelineParts
from unirl.models.lora import merge_adapter
from unirl.models.lora_export import write_lora


class PipelineModel(DiffusionModel):
    """A family of one denoising network; families of several give `network` themselves."""

    parts: ClassVar[PipelineParts]
    blueprint_reads_weights: ClassVar = False

    def __init__(
        self,
        folder: DiffusersFolder,
        networks: Mapping[str, Any],
        frozen: Mapping[str, Any] | None,
        settings: LoadSettings,
    ) -> None:
        """frozen: encoders, decoder and processors; None without them."""
        self.folder = folder
        self.networks = networks
        self.settings = settings
        # Any: the annotations of diffusers are narrower or wider than its values.
        self.scheduler: Any = folder.scheduler()
        self._pipeline: Any = None
        if frozen is not None:
            self._pipeline = folder.pipeline_class(
                scheduler=self.scheduler, **networks, **frozen, **folder.settings
            )

    @classmethod
    def load(cls, path: Path, settings: LoadSettings) -> Self:
        """Read the folder `path`, see `DiffusionModel.load`.

        Raises ModelError naming the path and the component that is missing or unreadable.
        """
        folder = DiffusersFolder(path, cls.parts)
        networks = {n: folder.network(n, settings) for n in folder.network_names}
        frozen = folder.frozen(settings.frozen, settings.frozen_dtype)
        return cls(folder, networks, frozen, settings)

    @classmethod
    def load_skeleton(cls, path: Path, settings: LoadSettings) -> Self:
        """See `DiffusionModel.load_skeleton`; raises ModelError like `load`."""
        folder = DiffusersFolder(path, cls.parts)
        dtype = settings.network_dtype
        networks = {name: folder.network_skeleton(name, dtype) for name in folder.network_names}
        frozen = folder.frozen(settings.frozen, settings.frozen_dtype)
        return cls(folder, networks, frozen, settings)

    @classmethod
    def blueprint(cls, path: Path, settings: LoadSettings) -> Self:
        """See `DiffusionModel.blueprint`: a folder of config files is enough."""
        folder = DiffusersFolder(path, cls.parts)
        networks = {name: folder.network_on_meta(name, settings) for name in folder.network_names}
        frozen = folder.frozen_on_meta(settings.frozen, settings.frozen_dtype)
        return cls(folder, networks, frozen, settings)

    def network_files(self) -> Mapping[str, Sequence[Path]]:
        (name,) = self.networks
        return {"": self.folder.network_files(name)}

    @property
    def network(self) -> nn.Module:
        (network,) = self.networks.values()
        return network

    @property
    def trained_components(self) -> Mapping[str, nn.Module]:
        return self.networks

    def write_adapter(self, folder: Path) -> Path:
        return write_lora(self.folder.pipeline_class, self.trained_components, folder)

    def write_model(self, folder: Path) -> Path:
        """The whole folder with the trained networks in place of the old ones."""
        if self.settings.quantization is not None:
            raise ModelError(
                f"model.quantization={self.settings.quantization}: an adapter is not merged into "
                "rounded weights. Export the adapter, or set model.quantization=null."
            )
        names = self.trained_components
        shutil.copytree(
            self.folder.path,
            folder,
            dirs_exist_ok=True,
            ignore=lambda path, _: names if Path(path) == self.folder.path else (),
        )
        for name, network in names.items():
            merge_adapter(network)
            network.save_pretrained(folder / name)  # type: ignore[operator]
        return folder

    @property
    def pipeline(self) -> Any:
        """The diffusers pipeline around the components. Raises ModelError without encoders."""
        if self._pipeline is None:
            raise ModelError(f"this {self.parts.family} was loaded without encoders and decoder.")
        return self._pipeline

    @property
    def frozen_modules(self) -> Mapping[str, nn.Module]:
        if self._pipeline is None:
            return {}
        found = {name: getattr(self._pipeline, name) for name in self.parts.modules}
        return {name: module for name, module in found.items() if module is not None}

    def arithmetic(self, like: Tensor) -> AbstractContextManager[Any]:
        """Around every call of the network: autocast below float32."""
        dtype = self.settings.compute_dtype
        return torch.autocast(like.device.type, dtype=dtype, enabled=dtype != torch.float32)

    def require_multiple(self, sampling: SamplingParams, multiple: int, why: str) -> None:
        """Raise ModelError for a height or width that is no multiple."""
        if sampling.height % multiple or sampling.width % multiple:
            raise ModelError(
                f"sampling.height={sampling.height}, sampling.width={sampling.width}: this model "
                f"takes multiples of {multiple} ({why}). Change sampling.height and sampling.width."
            )

    def require_no_guidance(self, sampling: SamplingParams) -> None:
        """Raise ModelError for a guidance scale above 1, in models that would ignore it."""
        if sampling.guidance_scale > 1:
            raise ModelError(
                f"sampling.guidance_scale={sampling.guidance_scale:g}: this {self.parts.family} "
                "was trained to make its images without guidance. Set sampling.guidance_scale=1 "
                "(and eval_sampling.guidance_scale, where it is set)."
            )
