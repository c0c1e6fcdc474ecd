"""Recompute a block's inside in the backward instead of keeping it: memory for a second forward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed._composable import checkpoint


def checkpoint_activations(blocks: Sequence[nn.Module]) -> None:
    """Only the inputs of each block are kept; names and parameters stay as they are."""
    for block in blocks:
        checkpoint(block)
