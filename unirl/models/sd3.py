"""Stable Diffusion 3 and 3.5, read from a local diffusers folder.

Encoding, schedule and image conversion are the diffusers pipeline's own, so an ODE rollout here is
the picture the deployed pipeline would give. In goes a folder with `model_index.json`; nothing is
fetched from the network and no pickle is read. A folder whose `text_encoder_3` is null runs
without T5, as the pipeline does.

    settings = LoadSettings(
        frozen_dtype=torch.bfloat16, compute_dtype=torch.bfloat16,
        max_sequence_length=256, with_encoders=True,
    )
    model = StableDiffusion3Model.load(Path("stable-diffusion-3.5-medium"), settings)
    conditioning = model.encode(["a sign that says 374"])
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from accelerate import init_empty_weights
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from unirl.core.errors import ModelError
from unirl.core.types import Conditioning
from unirl.memory.movers import own_storages
from unirl.models.base import DiffusionModel, LoadSettings
from unirl.models.on_meta import BlankTokenizer, module_on_meta

T = TypeVar("T")

NETWORK = "transformer"
"""The component that is trained."""
CLIP_TOKENS = 77
"""Length every CLIP prompt is padded to; the T5 tokens follow it."""


@dataclass(frozen=True)
class Sd3Conditioning(Conditioning):
    """What the three text encoders say about B prompts."""

    prompt_embeds: Tensor
    """[B, 77 + max_sequence_length, D] CLIP tokens, then T5 tokens (zeros without a T5)."""
    pooled: Tensor
    """[B, P] both CLIPs' pooled vectors."""


class StableDiffusion3Model(DiffusionModel):
    """The MMDiT, its text encoders and its VAE."""

    def __init__(
        self,
        network: SD3Transformer2DModel,
        scheduler: FlowMatchEulerDiscreteScheduler,
        pipeline: StableDiffusion3Pipeline | None,
        *,
        network_folder: Path,
        vae_scale_factor: int,
        settings: LoadSettings,
    ) -> None:
        """pipeline: holder of the encoders and the VAE; None without them."""
        self._network = network
        # Any: the annotations of diffusers are narrower or wider than its values.
        self._scheduler: Any = scheduler
        self._pipeline: Any = pipeline
        self._network_folder = network_folder
        self._vae_scale_factor = vae_scale_factor
        self._settings = settings

    @classmethod
    def load(cls, path: Path, settings: LoadSettings) -> Self:
        """Read the folder `path`, see `DiffusionModel.load`.

        Raises ModelError naming the path and the component that is missing or unreadable.
        """
        _read_index(path)
        network = _read_module(path, NETWORK, SD3Transformer2DModel, settings.network_dtype)
        encoders = _read_encoders(path, settings.frozen_dtype) if settings.with_encoders else None
        return cls._around(network, path, encoders, settings)

    @classmethod
    def load_skeleton(cls, path: Path, settings: LoadSettings) -> Self:
        """See `DiffusionModel.load_skeleton`; raises ModelError like `load`."""
        _read_index(path)
        network = _read(path, NETWORK, lambda folder: _skeleton(folder, settings.network_dtype))
        encoders = _read_encoders(path, settings.frozen_dtype) if settings.with_encoders else None
        return cls._around(network, path, encoders, settings)

    @classmethod
    def blueprint(cls, path: Path, settings: LoadSettings) -> Self:
        """See `DiffusionModel.blueprint`: a folder of config files is enough."""
        _read_index(path)
        network = _read_on_meta(path, NETWORK, SD3Transformer2DModel, settings.network_dtype)
        encoders = _blank_encoders(path, settings.frozen_dtype) if settings.with_encoders else None
        return cls._around(network, path, encoders, settings)

    @classmethod
    def _around(
        cls,
        network: SD3Transformer2DModel,
        path: Path,
        encoders: Mapping[str, Any] | None,
        settings: LoadSettings,
    ) -> Self:
        """The network, and the other components of the folder around it."""
        scheduler = _read(path, "scheduler", _scheduler)
        vae_config = _read(path, "vae", _vae_config)
        pipeline = None
        if encoders is not None:
            pipeline = StableDiffusion3Pipeline(
                transformer=network, scheduler=scheduler, **encoders
            )
        return cls(
            network,
            scheduler,
            pipeline,
            network_folder=path / NETWORK,
            vae_scale_factor=2 ** (len(vae_config["block_out_channels"]) - 1),
            settings=settings,
        )

    def network_files(self) -> Sequence[Path]:
        return sorted(self._network_folder.glob("*.safetensors"))

    @property
    def network(self) -> nn.Module:
        return self._network

    @property
    def frozen_modules(self) -> Mapping[str, nn.Module]:
        if self._pipeline is None:
            return {}
        components = self._pipeline.components
        return {
            name: component
            for name, component in components.items()
            if isinstance(component, nn.Module) and component is not self._network
        }

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> Sd3Conditioning:
        """Conditioning in frozen_dtype on the text encoders' device, by the pipeline's own method.

        CLIP reads the first 77 tokens of a prompt, T5 the first max_sequence_length.
        """
        pipeline = self._loaded_pipeline()
        prompt_embeds, _, pooled, _ = pipeline.encode_prompt(
            prompt=list(texts),
            prompt_2=None,  # None: the same prompt for every encoder
            prompt_3=None,
            device=pipeline.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self._settings.max_sequence_length,
        )
        return Sd3Conditioning(prompt_embeds, pooled)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, Sd3Conditioning)
        with torch.autocast(
            latents.device.type,
            dtype=self._settings.compute_dtype,
            enabled=self._settings.compute_dtype != torch.float32,
        ):
            # The embeddings may be bf16 beside a float32 network; widening them is exact.
            (velocity,) = self._network(
                hidden_states=latents,
                timestep=sigma * self._scheduler.config["num_train_timesteps"],
                encoder_hidden_states=conditioning.prompt_embeds.float(),
                pooled_projections=conditioning.pooled.float(),
                return_dict=False,
            )
        return velocity.float()

    def pixels(self, latents: Tensor) -> Tensor:
        pipeline = self._loaded_pipeline()
        vae = pipeline.vae
        scaled = latents / vae.config["scaling_factor"] + vae.config["shift_factor"]
        decoded = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return pipeline.image_processor.postprocess(decoded, output_type="pt").float()

    @torch.no_grad()
    def latents_of(self, images: Tensor) -> Tensor:
        vae = self._loaded_pipeline().vae
        scaled = (images.to(vae.device).float() / 127.5 - 1).to(vae.dtype)
        # The mean of the encoder's distribution: the same image gives the same latents.
        mean = vae.encode(scaled).latent_dist.mode()
        return ((mean - vae.config["shift_factor"]) * vae.config["scaling_factor"]).float()

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Raises ModelError for a size the network's patches or position table do not cover."""
        config = self._network.config
        factor, patch = self._vae_scale_factor, config["patch_size"]
        multiple = factor * patch
        largest = multiple * config["pos_embed_max_size"]
        if height % multiple or width % multiple or max(height, width) > largest:
            raise ModelError(
                f"sampling.height={height}, sampling.width={width}: this model takes multiples of "
                f"{multiple} (VAE factor {factor} x patch {patch}) up to {largest} pixels. "
                "Change sampling.height and sampling.width."
            )
        return (config["in_channels"], height // factor, width // factor)

    def sigmas(self, num_steps: int, height: int, width: int) -> tuple[float, ...]:
        """What the pipeline's `set_timesteps(num_steps)` gives with the folder's scheduler.

        A static shift acts twice there, on the range of the grid and on the grid, so the last step
        is very short (docs/models/sd3.md has the numbers).
        """
        scheduler = self._scheduler
        is_dynamic = scheduler.config["use_dynamic_shifting"]
        mu = self._dynamic_shift(height, width) if is_dynamic else None
        scheduler.set_timesteps(num_steps, mu=mu)
        _, *rest = scheduler.sigmas.tolist()
        # The first value is 1 but for the last bit of float32 at some shifts (3 is exact, 1.4976 is
        # not), and an SDE step divides by 1 - sigma.
        return (1.0, *rest)

    def _dynamic_shift(self, height: int, width: int) -> float:
        """The pipeline's mu, linear in the number of image tokens."""
        _, latent_height, latent_width = self.latent_shape(height, width)
        patch = self._network.config["patch_size"]
        config = self._scheduler.config
        return calculate_shift(
            (latent_height // patch) * (latent_width // patch),
            config["base_image_seq_len"],
            config["max_image_seq_len"],
            config["base_shift"],
            config["max_shift"],
        )

    def example_conditioning(self, batch: int, generator: torch.Generator) -> Sd3Conditioning:
        config = self._network.config
        tokens = CLIP_TOKENS + self._settings.max_sequence_length
        conditioning = Sd3Conditioning(
            torch.randn(batch, tokens, config["joint_attention_dim"], generator=generator),
            torch.randn(batch, config["pooled_projection_dim"], generator=generator),
        )
        return conditioning.to(self._network.device)

    def _loaded_pipeline(self) -> Any:
        if self._pipeline is None:
            raise ModelError("this Stable Diffusion 3 was loaded without text encoders and VAE.")
        return self._pipeline


def _read_index(path: Path) -> Mapping[str, Any]:
    """model_index.json of an SD3 folder."""
    file = path / "model_index.json"
    if not file.is_file():
        raise ModelError(
            f"model.path={path} is not a diffusers folder: it has no model_index.json. Set "
            "model.path to a folder made by StableDiffusion3Pipeline.save_pretrained or a "
            "downloaded copy of the model repository."
        )
    try:
        index = json.loads(file.read_text())
        found = index["_class_name"], index["scheduler"][1]
    except (ValueError, LookupError, TypeError) as error:
        raise ModelError(f"{file} is not a diffusers model index: {error!r}.") from error
    expected = "StableDiffusion3Pipeline", "FlowMatchEulerDiscreteScheduler"
    if found != expected:
        raise ModelError(
            f"model.path={path}: model.family=sd3 reads {expected[0]} with {expected[1]}, found "
            f"{found[0]} with {found[1]}. Set model.path or model.family."
        )
    return index


def _has_t5(path: Path) -> bool:
    index = _read_index(path)
    return "text_encoder_3" in index and index["text_encoder_3"][0] is not None


def _read_encoders(path: Path, dtype: torch.dtype) -> dict[str, Any]:
    """VAE, text encoders and tokenizers under the names the pipeline takes."""
    has_t5 = _has_t5(path)
    clip, t5 = CLIPTextModelWithProjection, T5EncoderModel
    return {
        "vae": _read_module(path, "vae", AutoencoderKL, dtype),
        "text_encoder": _read_module(path, "text_encoder", clip, dtype),
        "text_encoder_2": _read_module(path, "text_encoder_2", clip, dtype),
        "text_encoder_3": _read_module(path, "text_encoder_3", t5, dtype) if has_t5 else None,
        "tokenizer": _read_tokenizer(path, "tokenizer", CLIPTokenizer),
        "tokenizer_2": _read_tokenizer(path, "tokenizer_2", CLIPTokenizer),
        "tokenizer_3": _read_tokenizer(path, "tokenizer_3", T5Tokenizer) if has_t5 else None,
    }


def _blank_encoders(path: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Like `_read_encoders`, from config files alone: modules on meta, tokenizers without words."""
    has_t5 = _has_t5(path)
    clip, t5 = CLIPTextModelWithProjection, T5EncoderModel
    return {
        "vae": _read_on_meta(path, "vae", AutoencoderKL, dtype),
        "text_encoder": _read_on_meta(path, "text_encoder", clip, dtype),
        "text_encoder_2": _read_on_meta(path, "text_encoder_2", clip, dtype),
        "text_encoder_3": _read_on_meta(path, "text_encoder_3", t5, dtype) if has_t5 else None,
        "tokenizer": BlankTokenizer(CLIP_TOKENS),
        "tokenizer_2": BlankTokenizer(CLIP_TOKENS),
        "tokenizer_3": BlankTokenizer(CLIP_TOKENS) if has_t5 else None,
    }


def _read_on_meta(path: Path, name: str, module_class: Any, dtype: torch.dtype) -> Any:
    return _read(path, name, lambda folder: module_on_meta(folder, module_class, dtype))


def _read_module(path: Path, name: str, module_class: Any, dtype: torch.dtype) -> Any:
    return _read(path, name, lambda folder: _module(folder, module_class, dtype))


def _read_tokenizer(path: Path, name: str, tokenizer_class: Any) -> Any:
    return _read(path, name, lambda folder: _tokenizer(folder, tokenizer_class))


def _read(path: Path, name: str, reader: Callable[[Path], T]) -> T:
    """reader(path / name), every failure told as a ModelError."""
    folder = path / name
    if not folder.is_dir():
        raise ModelError(
            f"model.path={path}: component {name} is missing (no folder {folder}). Complete the "
            "folder; only text_encoder_3 with tokenizer_3 may be left out, by naming both "
            "[null, null] in model_index.json."
        )
    try:
        return reader(folder)
    # The libraries raise OSError, ValueError, RuntimeError, SafetensorError and more.
    except Exception as error:
        raise ModelError(
            f"model.path={path}: component {name} cannot be read. Fetch or copy {folder} "
            f"again. The reader said: {error}"
        ) from error


def _module(folder: Path, module_class: Any, dtype: torch.dtype) -> Any:
    """A frozen module in eval mode that owns its memory."""
    # Without the file transformers would quietly take its default architecture.
    if not (folder / "config.json").is_file():
        raise FileNotFoundError("no config.json.")
    module, info = module_class.from_pretrained(
        folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    # The libraries would go on with random values in their place.
    if info["missing_keys"]:
        raise ValueError(f"the weights lack {sorted(info['missing_keys'])[:4]}.")
    own_storages(module)
    return module.eval().requires_grad_(False)


def _skeleton(folder: Path, dtype: torch.dtype) -> SD3Transformer2DModel:
    """The network of a folder with its parameters on the meta device and its buffers real."""
    config = SD3Transformer2DModel.load_config(folder, local_files_only=True)
    assert isinstance(config, dict)
    with init_empty_weights(include_buffers=False):
        network: Any = SD3Transformer2DModel.from_config(config)
    return network.to(dtype).eval().requires_grad_(False)


def _tokenizer(folder: Path, tokenizer_class: Any) -> Any:
    """A tokenizer with a vocabulary: without files transformers returns an empty one."""
    files = dict(tokenizer_class.vocab_files_names)
    complete = folder / files.pop("tokenizer_file")
    if not complete.is_file() and not all((folder / name).is_file() for name in files.values()):
        raise FileNotFoundError(
            f"the folder has neither {complete.name} nor {' and '.join(files.values())}."
        )
    return tokenizer_class.from_pretrained(folder, local_files_only=True)


def _scheduler(folder: Path) -> Any:
    return FlowMatchEulerDiscreteScheduler.from_pretrained(folder, local_files_only=True)


def _vae_config(folder: Path) -> Mapping[str, Any]:
    config = AutoencoderKL.load_config(folder, local_files_only=True)
    assert isinstance(config, dict)
    return config
