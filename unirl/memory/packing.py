"""Consecutive small storages come back from the host as one.

Thousands of small tensors cost far more to move than their bytes: calls for each of them, and
copies that are over before they are fast. While they are parked their memory is empty anyway, so it
is given back to all of them as places in one storage: the same bytes in the same order, and the
same `Tensor` and `Parameter` objects, which only point elsewhere. In go the parked storages and the
tensors that are declared; out come `Pack`s. Nothing here moves bytes.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn

SMALL_BYTES = 2**20
"""Storages below this are packed; from here on a copy takes far longer than starting it."""
WHOLE_BYTES = 64 * 2**20
"""About the size of a whole: one copy is fast already, and a device whose free memory is in pieces
still has room."""
PLACE_BYTES = 512
"""Sizes that are no multiple of this are left alone: then no byte is added between places, and
every tensor is aligned as a GPU's allocator aligns it, so that kernels choose and round as they did
before."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where a declared tensor will lie."""

    tensor: Tensor
    start: int
    """The byte of the whole at which its old storage begins."""


@dataclass(frozen=True, eq=False)
class Pack:
    """Storages that come back as one."""

    storages: tuple[UntypedStorage, ...]
    whole: UntypedStorage
    """Takes their place; it has no memory yet."""
    places: tuple[Place, ...]


def find_packs(sizes: Mapping[UntypedStorage, int], tensors: Iterable[Tensor]) -> list[Pack]:
    """Which of these parked storages may come back as one.

    sizes: in order, the bytes they had; tensors: all that are declared to lie there.

    A storage that anybody else points at is left alone: a tensor that is not declared, a view for
    one, would stay behind on it without contents.
    """
    if not any(_is_small(a) and _is_small(b) for a, b in itertools.pairwise(sizes.values())):
        return []
    users: dict[UntypedStorage, dict[int, Tensor]] = {}
    for tensor in tensors:
        users.setdefault(tensor.untyped_storage(), {})[id(tensor)] = tensor
    starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))

    def run_of(storage: UntypedStorage) -> tuple[bool, int]:
        is_free = _is_small(sizes[storage]) and _may_leave(storage, users)
        return is_free, starts[storage] // WHOLE_BYTES

    runs = [(is_free, tuple(run)) for (is_free, _), run in itertools.groupby(sizes, run_of)]
    return [_pack(run, sizes, users) for is_free, run in runs if is_free and len(run) > 1]


def _pack(
    storages: tuple[UntypedStorage, ...],
    sizes: Mapping[UntypedStorage, int],
    users: Mapping[UntypedStorage, Mapping[int, Tensor]],
) -> Pack:
    starts = itertools.accumulate((sizes[storage] for storage in storages), initial=0)
    places = [
        Place(tensor, start)
        for storage, start in zip(storages, starts, strict=False)
        for tensor in users[storage].values()
    ]
    return Pack(storages, UntypedStorage(0, device=storages[0].device), tuple(places))


def _is_small(num_bytes: int) -> bool:
    return 0 < num_bytes < SMALL_BYTES and num_bytes % PLACE_BYTES == 0


def _may_leave(
    storage: UntypedStorage, users: Mapping[UntypedStorage, Mapping[int, Tensor]]
) -> bool:
    """Whether it is empty, and all that points at it is declared and can point elsewhere."""
    tensors = users.get(storage, {}).values()
    # One count for each tensor, and one for `storage` itself.
    is_ours = torch._C._storage_Use_Count(storage._cdata) == len(tensors) + 1
    return not storage.nbytes() and bool(tensors) and is_ours and all(map(_is_plain, tensors))


def _is_plain(tensor: Tensor) -> bool:
    """Subclasses may keep more than one storage; views would lose the tensor they are views of."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_inference() or tensor._is_view())
        and not (tensor.is_conj() or tensor.is_neg())
    )


def settle(packs: Iterable[Pack]) -> None:
    """Let the tensors point at their places, which must have memory; all of them or none."""
    places = [(place, pack.whole) for pack in packs for place in pack.places]
    before = [place.tensor.data for place, _ in places]
    try:
        for place, whole in places:
            place.tensor.data = _at(place, whole)
    except BaseException:
        for (place, _), old in zip(places, before, strict=True):
            place.tensor.data = old
        raise


def _at(place: Place, whole: UntypedStorage) -> Tensor:
    tensor = place.tensor
    empty = torch.empty(0, dtype=tensor.dtype, device=whole.device)
    start = place.start // tensor.element_size() + int(tensor.storage_offset())
    return empty.set_(whole, start, tensor.shape, tensor.stride())  # type: ignore[call-overload]


def unused_bytes(whole: UntypedStorage, pieces: Sequence[int], tensors: Iterable[Tensor]) -> int:
    """Of the places in a packed storage, those that no tensor lies in any more.

    pieces: bytes of each place.
    """
    starts = list(itertools.accumulate(pieces, initial=0))[:-1]
    used = {
        bisect.bisect_right(starts, int(tensor.storage_offset()) * tensor.element_size()) - 1
        for tensor in tensors
        if tensor.untyped_storage() is whole
    }
    return sum(size for place, size in enumerate(pieces) if place not in used)
