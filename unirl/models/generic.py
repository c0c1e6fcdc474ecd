"""Any flow-matching pipeline of diffusers without a family of its own, through its own call.

The pipeline's `__call__` is run with a scheduler that stops it at its first step: what it hands to
the scheduler there is the velocity, guidance included, because FlowMatchEulerDiscreteScheduler does
x + v dt with it. So nothing of the pipeline is written again here, and every answer costs a whole
call: prompts are encoded anew for batches that were not asked before. Before a run the samples are
compared with those of the pipeline's own scheduler, and a pipeline that differs is refused.

    unirl train RECIPE model.family=generic model.path=FOLDER 'stack.lora.target_modules=[to_q]'
"""

from __future__ import annotations

import inspect
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from unirl.core.errors import ModelError
from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.memory.movers import own_storages
from unirl.models.base import DiffusionModel, LoadSettings
from unirl.models.flow_match import from_one_to_zero
from unirl.models.lora import merge_adapter
from unirl.models.lora_export import write_lora
from unirl.models.video_frames import chosen_frames

NETWORK = "transformer"
LARGEST_DIFFERENCE = 1e-2
"""Between our samples and the pipeline's, over the latents' size: bf16 rounding, not more."""
REMEMBERED_BATCHES = 256
EXAMPLE = "a red cat on a blue chair"
"""A prompt unlike the empty one, so that guidance is part of the comparison."""


@dataclass(frozen=True)
class GenericConditioning(Conditioning):
    """B samples by what the pipeline's call is given."""

    prompt: Tensor
    """[B] int64 number of the text in the model's list."""
    guidance: Tensor
    """[B] float32."""
    size: Tensor
    """[B, 3] int64 height, width, frames."""


class GenericModel(DiffusionModel):
    """A pipeline whose denoising network is its `transformer`."""

    def __init__(self, pipeline: Any, pipeline_class: type, settings: LoadSettings) -> None:
        self._pipeline = pipeline
        self._class = pipeline_class
        self._settings = settings
        self._texts: dict[str, int] = {}
        self._checked: set[tuple[float, ...]] = set()
        self._deployed = pipeline.scheduler
        self._held = _held_scheduler(pipeline.scheduler)
        # Without its no_grad.
        self._call: Callable[..., Any] = inspect.unwrap(pipeline_class.__call__)
        self._arguments = inspect.signature(self._call).parameters

    @classmethod
    def load(cls, path: Path, settings: LoadSettings) -> Self:
        """Read the folder `path`, whole whatever the settings leave out: the call needs all of it.

        Raises ModelError for a folder that cannot be read, another scheduler than
        FlowMatchEulerDiscreteScheduler, or a pipeline without a `transformer`.
        """
        try:
            loaded: Any = DiffusionPipeline.from_pretrained(
                path,
                **_absent(path),
                # One dtype for all: the call hands tensors from one to the other as they are.
                dtype=settings.network_dtype,
                local_files_only=True,
                use_safetensors=True,
            )
        except Exception as error:  # the libraries raise many kinds
            raise ModelError(f"model.path={path} cannot be read as a pipeline: {error}") from error
        found = type(loaded.scheduler).__name__
        if not isinstance(loaded.scheduler, FlowMatchEulerDiscreteScheduler):
            raise ModelError(
                f"model.path={path}: model.family=generic needs FlowMatchEulerDiscreteScheduler, "
                f"found {found}."
            )
        networks = [n for n, m in _modules(loaded).items() if n.startswith(NETWORK)]
        if networks != [NETWORK]:
            raise ModelError(
                f"model.path={path}: model.family=generic trains one network, {NETWORK}; the "
                f"pipeline has {networks}."
            )
        pipeline = _remembering(type(loaded))(**loaded.components, **_settings_of(loaded))
        pipeline.set_progress_bar_config(disable=True)
        for module in _modules(pipeline).values():
            own_storages(module.eval().requires_grad_(False))
        return cls(pipeline, type(loaded), settings)

    @classmethod
    def blueprint(cls, path: Path, settings: LoadSettings) -> Self:
        raise ModelError(
            "model.family=generic cannot be planned: what its pipeline does is known only by "
            "running it. Set model.release for the sizes of a family that unirl has."
        )

    @property
    def network(self) -> nn.Module:
        return self._pipeline.transformer

    @property
    def trained_components(self) -> Mapping[str, nn.Module]:
        return {NETWORK: self.network}

    @property
    def frozen_modules(self) -> Mapping[str, nn.Module]:
        return {name: m for name, m in _modules(self._pipeline).items() if name != NETWORK}

    def write_adapter(self, folder: Path) -> Path:
        return write_lora(self._class, self.trained_components, folder)

    def write_model(self, folder: Path) -> Path:
        merge_adapter(self.network)
        self._pipeline.save_pretrained(folder)
        return folder

    def encode(self, prompts: Sequence[PromptRecord], sampling: SamplingParams) -> Conditioning:
        """Numbers of the texts: the pipeline encodes them itself."""
        numbers = [self._texts.setdefault(p.text, len(self._texts)) for p in prompts]
        return self._conditioning(numbers, sampling)

    def needs_negative(self, sampling: SamplingParams) -> bool:
        """False: the pipeline's own call guides."""
        return False

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """The pipeline's velocity, guidance included: one call for each noise level."""
        assert isinstance(conditioning, GenericConditioning)
        known = list(self._texts)
        level = torch.cat(
            [sigma[:, None].cpu(), conditioning.guidance[:, None], conditioning.size.float()], dim=1
        )
        velocity = torch.zeros_like(latents)
        for kind in level.unique(dim=0):
            rows = torch.nonzero((level == kind).all(dim=1)).flatten()
            texts = [known[number] for number in conditioning.prompt[rows].tolist()]
            self._held.hold(float(kind[0]))
            answer = self._ask(
                texts, latents[rows], float(kind[1]), [int(size) for size in kind[2:]]
            )
            velocity = velocity.index_put((rows.to(latents.device),), answer.velocity.float())
        return velocity

    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        """By the pipeline's own end: its call with a scheduler that returns these latents."""
        size = (sampling.height, sampling.width, sampling.num_frames)
        self._held.decode(latents)
        with self._scheduled(self._held):
            output = self._run([""] * len(latents), latents, 1.0, size, "pt", 1)
        made = output[0].float() if isinstance(output, tuple) else output
        return chosen_frames(made, sampling.decoded_frames) if made.ndim == 5 else made

    def latent_shape(self, sampling: SamplingParams) -> tuple[int, ...]:
        return self._probe(sampling, None).sample.shape[1:]

    def sigmas(self, sampling: SamplingParams) -> tuple[float, ...]:
        """Those of the pipeline's own scheduler; compares three steps with it, once per size."""
        levels = from_one_to_zero(self._levels(sampling, sampling.num_inference_steps))
        self._compare_once(sampling)
        return levels

    def example_conditioning(
        self, batch: int, sampling: SamplingParams, generator: torch.Generator
    ) -> Conditioning:
        return self.encode([PromptRecord("", "")] * batch, sampling)

    # --- the pipeline's call ----------------------------------------------------------------------

    def _conditioning(self, numbers: Sequence[int], sampling: SamplingParams) -> Conditioning:
        size = (sampling.height, sampling.width, sampling.num_frames)
        return GenericConditioning(
            torch.tensor(numbers),
            torch.full((len(numbers),), sampling.guidance_scale),
            torch.tensor([size] * len(numbers)),
        )

    def _ask(
        self, texts: Sequence[str], latents: Tensor | None, guidance: float, size: Sequence[int]
    ) -> _Answer:
        """What the call hands to its scheduler at the level that is held."""
        try:
            with self._scheduled(self._held), self._arithmetic():
                self._run(texts, latents, guidance, size, "latent", 1)
        except _Answer as answer:
            if latents is not None and answer.sample.shape != latents.shape:
                raise ModelError(
                    f"{self._class.__name__} does not take latents as its "
                    f"loop has them: {tuple(latents.shape)} became {tuple(answer.sample.shape)}. "
                    "It needs a family of its own."
                ) from None
            return answer
        raise ModelError("the pipeline's call ended without a step of its scheduler.")

    def _run(
        self,
        texts: Sequence[str],
        latents: Tensor | None,
        guidance: float,
        size: Sequence[int],
        output_type: str,
        num_steps: int,
    ) -> Any:
        height, width, frames = size
        given: dict[str, Any] = {
            "prompt": list(texts),
            "height": height,
            "width": width,
            "num_inference_steps": num_steps,
            "output_type": output_type,
            "return_dict": False,
            "generator": torch.Generator().manual_seed(0),
        }
        optional = {
            "guidance_scale": (guidance, guidance > 1),
            "num_frames": (frames, frames > 1),
            "max_sequence_length": (self._settings.max_sequence_length, False),
        }
        for name, (value, is_needed) in optional.items():
            if name in self._arguments:
                given[name] = value
            elif is_needed:
                raise ModelError(
                    f"sampling.{name}={value:g}: {self._class.__name__} takes "
                    f"no {name}. Leave it out."
                )
        return self._call(self._pipeline, latents=latents, **given)

    @contextmanager
    def _scheduled(self, scheduler: Any) -> Iterator[None]:
        self._pipeline.scheduler = scheduler
        try:
            yield
        finally:
            self._pipeline.scheduler = self._deployed

    def _arithmetic(self) -> Any:
        dtype = self._settings.compute_dtype
        return torch.autocast(self._device.type, dtype=dtype, enabled=dtype != torch.float32)

    @property
    def _device(self) -> torch.device:
        return next(self.network.parameters()).device

    @torch.no_grad()
    def _probe(self, sampling: SamplingParams, latents: Tensor | None) -> _Answer:
        self._held.hold(1.0)
        size = (sampling.height, sampling.width, sampling.num_frames)
        return self._ask([""], latents, sampling.guidance_scale, size)

    @torch.no_grad()
    def _levels(self, sampling: SamplingParams, num_steps: int) -> list[float]:
        """What the pipeline sets in its scheduler for so many steps."""
        self._held.hold(1.0)
        size = (sampling.height, sampling.width, sampling.num_frames)
        try:
            with self._scheduled(self._held), self._arithmetic():
                self._run([""], None, sampling.guidance_scale, size, "latent", num_steps)
        except _Answer:
            pass
        return self._held.deployed_levels

    @torch.no_grad()
    def _compare_once(self, sampling: SamplingParams) -> None:
        """Raise ModelError unless three of our steps end where the pipeline's own end."""
        size = (sampling.height, sampling.width, sampling.num_frames)
        if (*size, sampling.guidance_scale) in self._checked:
            return
        shape = self.latent_shape(sampling)
        start = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))
        start = start.to(self._device)
        with self._arithmetic():
            theirs = self._run([EXAMPLE], start, sampling.guidance_scale, size, "latent", 3)[0]
        ours, conditioning = start, self.encode([PromptRecord("", EXAMPLE)], sampling)
        levels = self._levels(sampling, 3)
        for level, following in pairwise(levels):
            sigma = torch.full((1,), level, device=start.device)
            ours = ours + (following - level) * self.velocity(ours, sigma, conditioning)
        difference = float((ours - theirs).norm() / theirs.norm())
        if not difference <= LARGEST_DIFFERENCE:
            raise ModelError(
                f"{self._class.__name__} does more than its scheduler sees: "
                f"after three steps its latents and ours differ by {difference:.2g} of their size. "
                "It needs a family of its own."
            )
        self._checked.add((*size, sampling.guidance_scale))


class _Answer(Exception):  # noqa: N818 (not an error)
    """Stops the pipeline's call at a step of its scheduler."""

    def __init__(self, velocity: Tensor, sample: Tensor) -> None:
        super().__init__()
        self.velocity = velocity
        self.sample = sample


class _HeldScheduler(FlowMatchEulerDiscreteScheduler):
    """Has one level, and at its step either stops the call or returns what it was given."""

    deployed_levels: list[float]

    def hold(self, level: float) -> None:
        self._level = level
        self._final: Tensor | None = None

    def decode(self, latents: Tensor) -> None:
        self._level = 1.0
        self._final = latents

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        sigmas: list[float] | None = None,
        mu: float | None = None,
        timesteps: list[float] | None = None,
    ) -> None:
        super().set_timesteps(num_inference_steps, device, sigmas, mu, timesteps)
        self.deployed_levels = self.sigmas.tolist()
        level = torch.tensor([self._level], dtype=torch.float32, device=device)
        self.sigmas = torch.cat([level, level.new_zeros(1)])
        self.timesteps = level * self.config["num_train_timesteps"]

    def step(  # type: ignore[override]
        self, model_output: Tensor, timestep: Any, sample: Tensor, **_: Any
    ) -> tuple[Tensor]:
        if self._final is None:
            raise _Answer(model_output, sample)
        return (self._final.to(sample.dtype),)


def _held_scheduler(deployed: Any) -> _HeldScheduler:
    held: Any = _HeldScheduler.from_config(deployed.config)
    return held


def _remembering(pipeline_class: type) -> type:
    """The pipeline class with prompts encoded once per batch of texts."""

    class Remembering(_RemembersPrompts, pipeline_class):
        pass

    # diffusers finds a pipeline's components by the signature of its __init__.
    Remembering.__name__ = pipeline_class.__name__
    Remembering.__module__ = pipeline_class.__module__
    Remembering.__init__ = pipeline_class.__init__  # type: ignore[misc]
    return Remembering


class _RemembersPrompts:
    """Keeps what `encode_prompt` returned on the CPU, by its arguments."""

    def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
        memory: OrderedDict[str, Any] = self.__dict__.setdefault("_encoded", OrderedDict())
        key = repr((args, sorted(kwargs.items())))
        device = self._execution_device  # type: ignore[attr-defined]
        if key not in memory:
            with torch.no_grad():
                said = super().encode_prompt(*args, **kwargs)  # type: ignore[misc]
            memory[key] = _moved(said, torch.device("cpu"))
            if len(memory) > REMEMBERED_BATCHES:
                memory.popitem(last=False)
        return _moved(memory[key], device)


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors, and tuples and lists of them, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(part, device) for part in value)
    return value


def _absent(path: Path) -> dict[str, None]:
    """Components that the index names [null, null]: diffusers wants to be told so again."""
    index = json.loads((path / "model_index.json").read_text())
    return {name: None for name, entry in index.items() if entry == [None, None]}


def _modules(pipeline: Any) -> dict[str, nn.Module]:
    return {n: m for n, m in pipeline.components.items() if isinstance(m, nn.Module)}


def _settings_of(pipeline: Any) -> dict[str, Any]:
    """Arguments of the pipeline's constructor that are no components."""
    known = inspect.signature(type(pipeline).__init__).parameters
    return {
        name: value
        for name, value in pipeline.config.items()
        if name in known and name not in pipeline.components
    }
