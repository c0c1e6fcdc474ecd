"""Networks of published models, built without memory for their weights.

A recipe names a folder of weights; the table needs only the shapes, which ship with unirl.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from unirl.config.schema import RunConfig
from unirl.planning.blueprint import blueprint_model


@dataclass(frozen=True)
class Network:
    """One architecture, and what sharding needs to know of it."""

    release: str
    """A name of model.release."""
    block_classes: tuple[str, ...]
    """Class names of the blocks that are gathered one at a time."""


NETWORKS = {
    "sd3-medium": Network("sd3-medium", ("JointTransformerBlock",)),
    "sd3.5-medium": Network("sd3.5-medium", ("JointTransformerBlock",)),
    "sd3.5-large": Network("sd3.5-large", ("JointTransformerBlock",)),
    "flux2-32b": Network("flux.2-dev", ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")),
}


def build_network(network: Network, config: RunConfig) -> nn.Module:
    """On the meta device: stored dtypes and trained parameters as in a run of the recipe.

    Raises ModelError when the recipe's LoRA targets match no layer.
    """
    released = config.model.model_copy(update={"path": "", "release": network.release})
    config = config.model_copy(update={"model": released})
    return blueprint_model(config, with_encoders=False).model.network
