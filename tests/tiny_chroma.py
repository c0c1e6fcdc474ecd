"""A Chroma folder of random weights: a pipeline that unirl has no family for."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    ChromaPipeline,
    ChromaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)
from families.sd3 import T5_WIDTH, kl_vae, t5_encoder, t5_tokenizer


def build_tiny_chroma(folder: Path) -> Path:
    """A pipeline that unirl has no file for."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ChromaPipeline(
            transformer=ChromaTransformer2DModel(
                in_channels=16,
                num_layers=1,
                num_single_layers=1,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=T5_WIDTH,
                axes_dims_rope=(4, 4, 8),
                approximator_num_channels=8,
                approximator_hidden_dim=16,
                approximator_layers=1,
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=kl_vae(latent_channels=4),
            text_encoder=t5_encoder(),
            tokenizer=t5_tokenizer(),  # type: ignore[arg-type]
        ).save_pretrained(folder)
    return folder
