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
    shadows: Mapping[str, Mapping[str, Tensor]],
    teachers: Mapping[str, Mapping[str, Tensor]],
    moments_on_demand: bool,
) -> list[Component]:
    """Frozen base, trained weights, optimizer moments, further sets of the trained weights,
    buffers, and text encoders if there are any.

    parameters: all of the network's, by name; moments: those there are now; num_writes: raised
    whenever trained weights, moments or shadows are written; shadows and teachers: by name and
    parameter; moments_on_demand: they are there only while the optimizer steps. Gradients are
    freed with the step.
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
    components += [
        _weight_set(name, tensors, local, num_writes, "optimizer step")
        for name, tensors in shadows.items()
    ]
    components += [
        _weight_set(name, tensors, local, lambda: FROZEN, "") for name, tensors in teachers.items()
    ]
    for name, module in model.frozen_modules.items():
        components += module_components(f"train.{name}", module)
    return components


def _weight_set(
    name: str,
    tensors: Mapping[str, Tensor],
    local: Callable[[Tensor], Tensor],
    version: Callable[[], int | None],
    written_by: str,
) -> Component:
    return TensorComponent(
        f"train.{name}", lambda: map(local, tensors.values()), version, written_by=written_by
    )
