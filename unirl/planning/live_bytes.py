"""How many bytes of tensors are alive, counted while operations run.

Every operation's outputs are looked at, and a storage counts from there until nothing refers to it,
autograd's saved tensors included. It is the same for real and for fake tensors; memory that a
kernel takes and gives back inside one operation is not seen.

    with LiveBytes(excluded=network.parameters()) as live:
        network(latents).sum().backward()
    print(live.peak)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations under it made: those alive now, and the most so far."""

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        """excluded: tensors that were there before; a view of one of them is no new memory."""
        super().__init__()
        self.now = 0
        self.peak = 0
        # Kept alive, so that no other storage gets their key.
        self._excluded = [tensor.untyped_storage() for tensor in excluded]
        self._known: dict[int, Any] = {storage._cdata: storage for storage in self._excluded}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def forget(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._known[key]
            self.now -= num_bytes

        self._known[key] = weakref.ref(storage, forget)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for one in result:
            yield from _tensors(one)
