"""Move a role's weights between device and host without changing a single Python object.

A *storage* is moved, not a tensor: tied weights move once, views and `Parameter` objects stay the
ones the optimizer knows, and a forgotten reference cannot keep device memory alive, because the
storage itself is emptied. A parked network raises in its first layer, but elementwise operations on
an emptied storage crash the process, so every role refuses to be used while it is parked.
On a CPU-only machine device and host are both RAM; the same moves are made and tested there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unirl.core.components import FROZEN, Component, Moved, RebuiltComponent, TensorComponent
from unirl.core.errors import ResidencyError


@dataclass(frozen=True)
class _Parked:
    """One emptied storage and its bytes on the host."""

    owner: TensorComponent
    storage: torch.UntypedStorage
    host: Tensor


class ComponentMover:
    """Parks and restores the components of one role.

    Host buffers are allocated at the first park, pinned where there is a GPU, and kept: the first
    touch of fresh memory costs several times the copy itself. A failed move leaves every component
    as it was before the move, so it can be tried again.
    """

    def __init__(self, components: Sequence[Component]) -> None:
        self._components = tuple(components)
        self._parked = False
        self._host_buffers: dict[int, Tensor] = {}
        # By component, not by its name: two scorers of one class have the same names.
        self._host_versions: dict[TensorComponent, int | None] = {}
        self._away: list[_Parked] = []

    def offload(self) -> Moved:
        """Free the device side of every component."""
        if self._parked:
            return Moved(0)
        copied = dropped = 0
        gone: list[RebuiltComponent] = []
        try:
            for component in self._tensor_components():
                component_copied, component_dropped = self._park(component)
                copied, dropped = copied + component_copied, dropped + component_dropped
            for component in self._rebuilt_components():
                dropped += component.drop()
                gone.append(component)
        except BaseException:
            self._fill_storages()
            self._away.clear()
            for component in gone:
                component.rebuild()
            raise
        self._parked = True
        return Moved(copied, dropped)

    def onload(self) -> Moved:
        """Bring every component back, bit for bit."""
        if not self._parked:
            return Moved(0)
        built: list[RebuiltComponent] = []
        try:
            moved = self._fill_storages()
            for component in self._rebuilt_components():
                moved += component.rebuild()
                built.append(component)
        except BaseException:
            for parked in self._away:
                parked.storage.resize_(0)
            for component in built:
                component.drop()
            raise
        self._away.clear()
        self._parked = False
        return Moved(moved)

    def _tensor_components(self) -> list[TensorComponent]:
        return [c for c in self._components if isinstance(c, TensorComponent)]

    def _rebuilt_components(self) -> list[RebuiltComponent]:
        return [c for c in self._components if isinstance(c, RebuiltComponent)]

    def _park(self, component: TensorComponent) -> tuple[int, int]:
        """Copy what the host lacks, then empty the storages; returns (copied, dropped) bytes."""
        version = component.version()
        host_is_current = version is not None and self._host_versions.get(component) == version
        storages = self._claim_storages(component)
        copied = dropped = 0
        away = []
        for storage in storages:
            host = self._host_buffers.get(storage._cdata)
            if host is not None and host_is_current:
                dropped += storage.nbytes()
            else:
                host = self._host_buffer(storage)
                host.copy_(_as_bytes(storage), non_blocking=host.is_pinned())
                copied += storage.nbytes()
            away.append(_Parked(component, storage, host))
        _synchronize(storages)  # the storages are emptied only once their copies are complete
        for storage in storages:
            storage.resize_(0)
        self._away += away
        self._host_versions[component] = version
        return copied, dropped

    def _fill_storages(self) -> int:
        """Copy every emptied storage back from the host; returns the bytes."""
        for parked in self._away:
            parked.storage.resize_(parked.host.numel())
            _as_bytes(parked.storage).copy_(parked.host, non_blocking=parked.host.is_pinned())
        _synchronize(parked.storage for parked in self._away)
        return sum(parked.host.numel() for parked in self._away)

    def _claim_storages(self, component: TensorComponent) -> list[torch.UntypedStorage]:
        """The component's storages, each once; refuses one that another component has parked."""
        parked_elsewhere = {parked.storage._cdata: parked.owner.name for parked in self._away}
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in component.tensors():
            storage = tensor.untyped_storage()
            if not storage.resizable():
                raise ResidencyError(
                    f"{component.name}: a tensor of shape {tuple(tensor.shape)} is mapped from a "
                    "file and cannot be parked; its model family must call own_storages()."
                )
            if storage._cdata in parked_elsewhere:
                raise ResidencyError(
                    f"{component.name} and {parked_elsewhere[storage._cdata]} hold the same memory "
                    f"(a tensor of shape {tuple(tensor.shape)}); declare it in one component."
                )
            storages[storage._cdata] = storage
        return list(storages.values())

    def _host_buffer(self, storage: torch.UntypedStorage) -> Tensor:
        buffer = self._host_buffers.get(storage._cdata)
        if buffer is None or buffer.numel() != storage.nbytes():
            pinned = storage.device.type == "cuda"
            buffer = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            self._host_buffers[storage._cdata] = buffer
        return buffer


def own_storages(module: nn.Module) -> None:
    """Give every parameter and buffer memory of its own, keeping ties and Parameter objects.

    Tied are tensors that lie in one place in one shape; other views become copies.

    Weights mapped from a file cannot be emptied and are not aligned, so that the same product may
    round differently than on owned memory.
    """
    fresh: dict[tuple[object, ...], Tensor] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.numel() == 0:
            continue
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in fresh:
            fresh[key] = tensor.data.clone(memory_format=torch.contiguous_format)
        tensor.data = fresh[key]


def module_components(name: str, module: nn.Module) -> list[TensorComponent]:
    """A module that nothing writes: its weights, and its buffers, which a forward might write."""
    return [
        TensorComponent(f"{name}.weights", lambda: list(module.parameters()), lambda: FROZEN),
        TensorComponent(f"{name}.buffers", lambda: list(module.buffers()), lambda: None),
    ]


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]


def _synchronize(storages: Iterable[torch.UntypedStorage]) -> None:
    if any(storage.device.type == "cuda" for storage in storages):
        torch.cuda.synchronize()
