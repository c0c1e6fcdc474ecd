"""A trained adapter as the LoRA file that diffusers and other programs load.

The adapter's scale alpha / rank is multiplied into its B matrices and the file says alpha = rank,
so a program that does not read alpha gets the same weights as one that does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from unirl.core.errors import ModelError
from unirl.models.lora import ADAPTER_NAME

FILE_NAME = "pytorch_lora_weights.safetensors"
"""What diffusers looks for in a folder."""


def write_lora(pipeline_class: Any, networks: Mapping[str, nn.Module], folder: Path) -> Path:
    """`folder`/pytorch_lora_weights.safetensors of the networks' adapters, by the pipeline's own.

    networks: by their names in the pipeline. Raises ModelError without an adapter and for a
    pipeline that has no LoRA format or does not read back what it wrote.
    """
    arguments = {}
    for name, network in networks.items():
        layers = folded_adapter(network)
        if layers:
            arguments[f"{name}_lora_layers"] = layers
            arguments[f"{name}_lora_adapter_metadata"] = _metadata(network)
    if not arguments:
        raise ModelError("the model has no adapter to export. Was it trained with stack.lora=null?")
    try:
        writer = pipeline_class.save_lora_weights
    except AttributeError as error:
        raise ModelError(
            f"{pipeline_class.__name__} has no LoRA format in diffusers. Export the merged model."
        ) from error
    writer(folder, **arguments)
    _require_read_back(pipeline_class, networks, folder)
    return folder / FILE_NAME


def _require_read_back(
    pipeline_class: Any, networks: Mapping[str, nn.Module], folder: Path
) -> None:
    """Raise ModelError unless the pipeline's reader finds every tensor as it was written."""
    read = pipeline_class.lora_state_dict(folder)
    found = read[0] if isinstance(read, tuple) else read
    for prefix, network in networks.items():
        for name, tensor in folded_adapter(network).items():
            other = found.get(f"{prefix}.{name}")
            if other is None or not torch.equal(other, tensor):
                raise ModelError(
                    f"{folder / FILE_NAME}: {pipeline_class.__name__} does not read {name} of "
                    f"{prefix} back as it was written."
                )


@torch.no_grad()
def folded_adapter(network: nn.Module) -> dict[str, Tensor]:
    """The adapter's weights on the CPU by the names diffusers gives them, scale multiplied in."""
    state = get_peft_model_state_dict(network, adapter_name=ADAPTER_NAME)
    scales = {
        name: layer.scaling[ADAPTER_NAME]
        for name, layer in network.named_modules()
        if isinstance(layer, LoraLayer)
    }

    def folded(name: str, tensor: Tensor) -> Tensor:
        layer, _, part = name.partition(".lora_")
        return tensor * scales[layer] if part.startswith("B.") else tensor.clone()

    return {name: folded(name, tensor.detach().cpu()) for name, tensor in state.items()}


def _metadata(network: nn.Module) -> dict[str, object]:
    """PEFT's own config of the adapter, with the scale that the folded weights need: 1."""
    config: LoraConfig = network.peft_config[ADAPTER_NAME]  # type: ignore[assignment, index]
    values = config.to_dict()
    values.update(lora_alpha=values["r"], use_rslora=False)
    return values
