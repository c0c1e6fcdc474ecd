"""What the train stack holds on the device, as components: a run's and a plan's are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from unirl.core.components import FROZEN, NETWORK_BASE, Component, TensorComponent
from unirl.memory.movers import module_components
from unirl.models.base import DiffusionModel
from unirl.models.lora import adapter_parameters
from unirl.train.backend import TrainBackend


def train_components(
    model: DiffusionModel,
    backend: TrainBackend,
    parameters: Mapping[str, nn.Parameter],
    moments: Callable[[], Iterable[Tensor]],
    num_writes: Callable[[], int],
    *,
    moments_on_demand: bool,
) -> list[Component]:
    """Frozen base, trained weights, optimizer moments, buffers, and text encoders if there are any.

    parameters: all of the network's, by name; moments: those there are now; num_writes: raised
    whenever trained weights or moments are written; moments_on_demand: they are there only while
    the optimizer steps. Gradients are freed with the step.
    """
    network, local = model.network, backend.local
    frozen = [p for p in parameters.values() if not p.requires_grad]
    trained = [p for p in parameters.values() if p.requires_grad]
    # An engine's own copy of the network has the same whole tensors.
    base_key = NETWORK_BASE if backend.holds_whole else ""
    components: list[Component] = [
        TensorComponent(
            "train.base", lambda: map(local, frozen), lambda: FROZEN, host_key=base_key
        ),
        TensorComponent(
            "train.adapter" if adapter_parameters(network) else "train.weights",
            lambda: map(local, trained),
            num_writes,
            written_by="optimizer step",
        ),
        TensorComponent(
            "train.moments",
            lambda: map(local, moments()),
            num_writes,
            written_by="optimizer step",
            on_demand=moments_on_demand,
        ),
        TensorComponent(
            "train.buffers", lambda: list(network.buffers()), lambda: None, written_by="forward"
        ),
    ]
    for name, module in model.frozen_modules.items():
        components += module_components(f"train.{name}", module)
    return components
