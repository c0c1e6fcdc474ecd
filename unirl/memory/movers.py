"""Move a role's weights between device and host without changing a single Python object.

A role is a list of components, each of which is moved by a part (see `parts`). A parked network
raises in its first layer, but elementwise operations on an emptied storage crash the process, so
every role refuses to be used while it is parked.
On a CPU-only machine device and host are both RAM; the same moves are made and tested there.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, UntypedStorage, nn

from unirl.core.components import (
    FROZEN,
    Component,
    Movable,
    RebuiltComponent,
    TensorComponent,
)
from unirl.core.errors import ResidencyError
from unirl.memory.copies import Device, device_of
from unirl.memory.hostmem import HostArena
from unirl.memory.parts import RebuiltPart, TensorPart, nothing
from unirl.memory.wrapped import plain_tensors


class RoleWeights:
    """The components of one role, each as the planner moves it."""

    def __init__(
        self,
        components: Sequence[Component],
        host: HostArena,
        before_parking: Callable[[], None] = nothing,
        device_of: Callable[[torch.device], Device] = device_of,
    ) -> None:
        """`before_parking` is called before anything is parked: it frees what is no component."""
        self._tensor_parts: list[TensorPart] = []
        parts: list[Movable] = []
        for name, component in zip(_unique_names(components), components, strict=True):
            match component:
                case TensorComponent():
                    copy = host.copy_of(component.host_key or name)
                    part = TensorPart(
                        name, component, copy, before_parking, device_of, self._note_owners
                    )
                    self._tensor_parts.append(part)
                    parts.append(part)
                case RebuiltComponent():
                    parts.append(RebuiltPart(name, component, before_parking))
        self.parts = tuple(parts)
        """One for each component, in order."""
        self._owners: weakref.WeakKeyDictionary[UntypedStorage, TensorPart] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def is_resident(self) -> bool:
        return all(part.is_resident or part.on_demand for part in self.parts)

    def require_resident(self, who: str, action: str) -> None:
        """ResidencyError unless everything is on the device."""
        away = [part.name for part in self.parts if not (part.is_resident or part.on_demand)]
        if away:
            raise ResidencyError(
                f"{who} was asked to {action} while parked ({', '.join(away)} are on the host)"
            )

    def on_host(self, tensor: Tensor) -> Tensor:
        """A fresh CPU copy of a declared tensor's values; nothing moves.

        While its component is parked they are read from the host copy. ResidencyError when the
        tensor is not declared, or its contents are lost.
        """
        storage = tensor.untyped_storage()
        owner = self._owner(storage)
        if owner is None:
            raise ResidencyError(
                f"a tensor of shape {tuple(tensor.shape)} was to be read, but no component "
                f"of {', '.join(part.name for part in self.parts) or 'this role'} declares it"
            )
        return owner.read(tensor)

    def leaked_bytes(self) -> dict[str, int]:
        """By component: device memory that it does not declare any more, but somebody keeps."""
        declared = {storage for part in self._tensor_parts for storage in part.storage_bytes()}
        leaks = {part.name: part.bytes_beside(declared) for part in self._tensor_parts}
        return {name: num_bytes for name, num_bytes in leaks.items() if num_bytes}

    def _owner(self, storage: UntypedStorage) -> TensorPart | None:
        if storage not in self._owners:
            self._note_owners()
        return self._owners.get(storage)

    def _note_owners(self) -> None:
        """Who declares which storage; refuses one that two components declare."""
        owners: dict[UntypedStorage, TensorPart] = {}
        for part in self._tensor_parts:
            for storage in part.storage_bytes():
                other = owners.setdefault(storage, part)
                if other is not part:
                    raise ResidencyError(
                        f"{part.name} and {other.name} hold the same memory "
                        f"({storage.nbytes()} bytes); declare it in one component."
                    )
        self._owners = weakref.WeakKeyDictionary(owners)


def _unique_names(components: Sequence[Component]) -> list[str]:
    """Two scorers of one class declare the same names; the second is called `name#2`."""
    seen: Counter[str] = Counter()
    names = []
    for component in components:
        seen[component.name] += 1
        number = seen[component.name]
        names.append(component.name if number == 1 else f"{component.name}#{number}")
    return names


def own_storages(module: nn.Module) -> None:
    """Give every parameter and buffer memory of its own, keeping ties and Parameter objects.

    Tied are tensors that lie in one place in one shape; other views become copies.

    Weights mapped from a file cannot be emptied and are not aligned, so that the same product may
    round differently than on owned memory.
    """
    fresh: dict[tuple[object, ...], Tensor] = {}
    held = [*module.parameters(), *module.buffers()]
    for tensor in itertools.chain.from_iterable(map(plain_tensors, held)):
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
        TensorComponent(
            f"{name}.buffers", lambda: list(module.buffers()), lambda: None, written_by="forward"
        ),
    ]
