"""Which weights of a network train: its adapter or all of them, in a run as in a plan."""

from __future__ import annotations

from unirl.config import catalog
from unirl.config.schema import RunConfig
from unirl.models.base import DiffusionModel
from unirl.models.lora import attach_lora
from unirl.samplers.noise import seed_of


def make_trainable(config: RunConfig, model: DiffusionModel) -> None:
    """Attach the recipe's adapter, or make all network weights float32 that require grad.

    Raises ModelError when a LoRA target matches no linear layer.
    """
    lora = config.stack.lora
    if lora is None:
        model.network.float().requires_grad_(True)
        return
    targets = lora.target_modules or list(catalog.MODELS[config.model.family].lora_targets)
    attach_lora(model.network, lora.rank, lora.alpha, targets, adapter_seed(config))


def adapter_seed(config: RunConfig) -> int:
    return seed_of(f"{config.seed}/lora")
