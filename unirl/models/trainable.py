"""A recipe's model, in a run as in a plan: how it is loaded and which of its weights train."""

from __future__ import annotations

import torch

from unirl.config import catalog
from unirl.config.schema import RunConfig
from unirl.models.base import DiffusionModel, Frozen, LoadSettings
from unirl.models.lora import attach_lora
from unirl.samplers.noise import seed_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_settings(config: RunConfig, with_encoders: bool) -> LoadSettings:
    """What the recipe asks of `DiffusionModel.load`.

    with_encoders: for a model that samples, not only for one that is trained.
    """
    sampler = Frozen.ALL if config.model.encodings is None else Frozen.DECODER
    return LoadSettings(
        frozen_dtype=DTYPES[config.model.frozen_dtype],
        compute_dtype=DTYPES[config.model.precision],
        max_sequence_length=config.model.max_sequence_length,
        frozen=sampler if with_encoders else Frozen.NONE,
        quantization=config.model.quantization,
    )


def make_trainable(config: RunConfig, model: DiffusionModel) -> None:
    """Attach the recipe's adapter, or make all network weights float32 that require grad.

    Raises ModelError when a LoRA target matches no linear layer.
    """
    lora = config.stack.lora
    if lora is None:
        model.network.float().requires_grad_(True)
        return
    targets = lora.target_modules or list(catalog.MODELS[config.model.family].lora_targets)
    attach_lora(
        model.network,
        lora.rank,
        lora.alpha,
        targets,
        adapter_seed(config),
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
    )


def adapter_seed(config: RunConfig) -> int:
    return seed_of(f"{config.seed}/lora")
