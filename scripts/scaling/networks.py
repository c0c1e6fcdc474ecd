"""Network architectures as data, and how one is built without memory for its weights.

A recipe names a folder of weights; the table needs only the shapes. They are those of the models'
published `transformer/config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import Flux2Transformer2DModel, SD3Transformer2DModel
from torch import nn

from unirl.config.catalog import MODELS
from unirl.config.schema import RunConfig
from unirl.models.lora import attach_lora


@dataclass(frozen=True)
class Network:
    """One architecture, and what sharding and LoRA need to know of it."""

    module_class: type[nn.Module]
    config: Mapping[str, Any]
    """Arguments of module_class."""
    block_classes: tuple[str, ...]
    """Class names of the blocks that are gathered one at a time."""
    lora_targets: tuple[str, ...]


def _sd3(**config: Any) -> Network:
    """The values all networks of the family share, and `config`."""
    shared = {
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "attention_head_dim": 64,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 2048,
    }
    family = MODELS["sd3"]
    return Network(
        SD3Transformer2DModel, shared | config, family.block_classes, family.lora_targets
    )


NETWORKS = {
    "sd3-medium": _sd3(
        num_layers=24,
        num_attention_heads=24,
        caption_projection_dim=1536,
        pos_embed_max_size=192,
    ),
    "sd3.5-medium": _sd3(
        num_layers=24,
        num_attention_heads=24,
        caption_projection_dim=1536,
        pos_embed_max_size=384,
        dual_attention_layers=tuple(range(13)),
        qk_norm="rms_norm",
    ),
    "sd3.5-large": _sd3(
        num_layers=38,
        num_attention_heads=38,
        caption_projection_dim=2432,
        pos_embed_max_size=192,
        qk_norm="rms_norm",
    ),
    # The defaults of diffusers' class are the 32B model. No family of unirl reads it yet.
    "flux2-32b": Network(
        Flux2Transformer2DModel,
        {},
        ("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
        (
            "attn.to_q",
            "attn.to_k",
            "attn.to_v",
            "attn.to_out.0",
            "attn.add_q_proj",
            "attn.add_k_proj",
            "attn.add_v_proj",
            "attn.to_add_out",
            "attn.to_qkv_mlp_proj",
        ),
    ),
}


def build_network(network: Network, config: RunConfig) -> nn.Module:
    """On the meta device: stored dtypes and trained parameters as in a run of the recipe.

    Raises ModelError when the recipe's LoRA targets match no layer.
    """
    with torch.device("meta"):
        module = network.module_class(**network.config)
    # As the families do it: float32 arithmetic needs float32 weights.
    if config.model.precision == "bf16" and config.model.frozen_dtype == "bf16":
        module.bfloat16()
    lora = config.stack.lora
    if lora is None:
        return module.float().requires_grad_(True)
    targets = lora.target_modules or network.lora_targets
    attach_lora(module, lora.rank, lora.alpha, targets, seed=0)
    return module
