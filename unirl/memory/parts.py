"""One component of a role, as it moves between device and host.

A `TensorPart` moves the *storages* of its tensors: tied weights move once, views and `Parameter`
objects stay the ones the optimizer knows, and a forgotten reference cannot keep device memory
alive, because the storage itself is emptied. Small storages come back as one (see `packing`). A
`RebuiltPart` frees itself and is built again.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, UntypedStorage

from unirl.core.components import (
    FROZEN,
    VOID,
    Moved,
    Parking,
    RebuiltComponent,
    StartedMove,
    TensorComponent,
    Version,
    Void,
)
from unirl.core.errors import ResidencyError
from unirl.memory.copies import Device, as_bytes
from unirl.memory.hostmem import HostCopy
from unirl.memory.packing import Pack, find_packs, settle, unused_bytes
from unirl.memory.wrapped import plain_tensors

SAMPLE_BYTES = 4096
NUM_SAMPLES = 16
"""Of a storage that is larger than all samples together."""


def nothing() -> None:
    return


class TensorPart:
    """Tensors of one role that move together."""

    def __init__(
        self,
        name: str,
        component: TensorComponent,
        host_copy: HostCopy,
        before_parking: Callable[[], None],
        device_of: Callable[[torch.device], Device],
        refuse_shared: Callable[[], None],
    ) -> None:
        if component.parking is Parking.REBUILD:
            raise ResidencyError(f"{name}: tensors cannot be rebuilt; declare a RebuiltComponent")
        self.name = name
        self.parking = component.parking
        self.written_by = component.written_by
        self.on_demand = component.on_demand
        self.host_key = host_copy.host_key
        self._component = component
        self._host_copy = host_copy
        self._before_parking = before_parking
        self._device_of = device_of
        self._refuse_shared = refuse_shared
        self._away: dict[UntypedStorage, int] | None = None
        """While parked: its emptied storages and the bytes they had."""
        self._spans: dict[UntypedStorage, Tensor] = {}
        """While parked: where their contents are; nothing when they were dropped."""
        self._unfilled: set[UntypedStorage] = set()
        """Storages that have memory again, but not their contents yet."""
        self._moved: weakref.WeakSet[UntypedStorage] = weakref.WeakSet()
        """Storages that were parked before, so the host copy is known to be theirs."""
        self._pieces: weakref.WeakKeyDictionary[UntypedStorage, tuple[int, ...]] = (
            weakref.WeakKeyDictionary()
        )
        """Of packed storages: the sizes of those they replace. The host copy keeps these pieces, so
        that a component that is packed and one that is not can share it."""
        self._lost_version: Version | None = None
        """Of contents that were dropped."""

    @property
    def is_resident(self) -> bool:
        return self._away is None

    def version(self) -> Version | Void:
        version = Version(self._component.version())
        return VOID if version == self._lost_version else version

    def num_bytes(self) -> int:
        return sum(self.storage_bytes().values())

    def host_bytes(self) -> int:
        return self._host_copy.num_bytes if self.parking is Parking.COPY else 0

    def _tensors(self) -> Iterator[Tensor]:
        """Those declared, quantised ones as the tensors they are made of."""
        return itertools.chain.from_iterable(map(plain_tensors, self._component.tensors()))

    def storage_bytes(self) -> dict[UntypedStorage, int]:
        """Bytes of each of its storages, each once, also while it is parked."""
        if self._away is not None:
            return self._away
        # Not a loop: thousands of tensors may lie in one storage.
        storages = dict.fromkeys(map(Tensor.untyped_storage, self._tensors()))
        return {storage: storage.nbytes() for storage in storages}

    def bytes_beside(self, declared: Collection[UntypedStorage]) -> int:
        """Device memory that it moved once and that no declared tensor lies in any more."""
        whole = sum(storage.nbytes() for storage in self._moved if storage not in declared)
        if self._away is not None:
            return whole
        tensors, packed = list(self._tensors()), self._pieces.items()
        return whole + sum(unused_bytes(s, p, tensors) for s, p in packed if s in declared)

    def park(self, *, copy: bool) -> Moved:
        """Also writes the host copy, whatever `copy` says, where it is not of these tensors."""
        return self.start_park(copy=copy).finish()

    def start_park(self, *, copy: bool) -> StartedMove:
        if self.parking is Parking.KEEP or not self.is_resident:
            return StartedMove.at_once(partial(Moved, 0))
        self._before_parking()
        sizes = self._claim()
        device = self._device(sizes)
        if self.parking is Parking.COPY and (copy or not self._is_on_host(sizes)):
            self._start_copy(device, sizes)
            complete = partial(self._complete_copy, device)
            moved = Moved(sum(sizes.values()))
        else:
            complete, moved = nothing, Moved(0, sum(sizes.values()))
        return StartedMove(complete, partial(self._leave, device, sizes, complete, moved), complete)

    def _leave(
        self,
        device: Device,
        sizes: dict[UntypedStorage, int],
        complete: Callable[[], None],
        moved: Moved,
    ) -> Moved:
        """Free the device side once the host has what it needs."""
        complete()
        if self.parking is Parking.COPY:
            self._spans = self._host_spans(sizes)
        else:
            self._lost_version = Version(self._component.version())
        self._away = sizes
        try:
            device.empty(list(sizes))
        except BaseException:
            self.unpark()
            raise
        if not self._moved.issuperset(sizes):
            self._moved.update(sizes)
        return moved

    def unpark(self) -> Moved:
        """Contents that were dropped come back with all bits set: NaN in every float format."""
        return self.start_unpark().finish()

    def start_unpark(self) -> StartedMove:
        if self._away is None:
            return StartedMove.at_once(partial(Moved, 0))
        if self.parking is Parking.COPY:
            self._require_whole_copy()
        device, packs = self._device(self._away), find_packs(self._away, self._tensors())
        sizes = self._packed(self._away, packs)
        gone = [s for s, size in sizes.items() if s.nbytes() != size or s in self._unfilled]
        # Until they are filled: an attempt that fails may leave them allocated.
        self._unfilled = self._away.keys() & gone
        stay = partial(self._stay_away, device, gone)
        try:
            device.allocate(gone, [sizes[storage] for storage in gone])
            self._start_filling(device, gone, sizes)
        except BaseException:
            stay()
            raise
        moved = Moved(sum(sizes.values()) if self.parking is Parking.COPY else 0)
        return StartedMove(device.wait, partial(self._arrive, device, packs, stay, moved), stay)

    def _arrive(
        self, device: Device, packs: Sequence[Pack], stay: Callable[[], None], moved: Moved
    ) -> Moved:
        """Use what was brought in."""
        try:
            device.wait()
            settle(packs)
        except BaseException:
            stay()
            raise
        self._moved.update(pack.whole for pack in packs)
        self._away, self._spans, self._unfilled = None, {}, set()
        return moved

    def _stay_away(self, device: Device, taken: Sequence[UntypedStorage]) -> None:
        """Free the memory that was taken to come back."""
        device.wait()
        device.empty(taken)

    def read(self, tensor: Tensor) -> Tensor:
        """A fresh CPU copy of one of its tensors, from wherever the values are."""
        if self.version() is VOID:
            raise ResidencyError(
                f"{self.name} was to be read, but its contents were dropped and not written since"
            )
        if self._away is None:
            return tensor.detach().to("cpu", copy=True)
        self._require_whole_copy()
        span = self._spans[tensor.untyped_storage()]
        start = int(span.storage_offset()) // tensor.element_size() + int(tensor.storage_offset())
        view = torch.empty(0, dtype=tensor.dtype)
        view.set_(span.untyped_storage(), start, tensor.shape, tensor.stride())  # type: ignore[call-overload]
        return view.clone()

    def _claim(self) -> dict[UntypedStorage, int]:
        """Its storages and their bytes; refuses those that must not be emptied."""
        sizes = self.storage_bytes()
        for storage, size in sizes.items():
            if not storage.resizable():
                raise ResidencyError(
                    f"{self.name}: a tensor in {size} bytes of memory is mapped from a "
                    "file and cannot be parked; its model family must call own_storages()."
                )
        if not self._moved.issuperset(sizes):
            self._refuse_shared()
        return sizes

    def _packed(
        self, sizes: Mapping[UntypedStorage, int], packs: Iterable[Pack]
    ) -> Mapping[UntypedStorage, int]:
        """The parked storages as they come back, in order, and their bytes."""
        wholes = {storage: pack.whole for pack in packs for storage in pack.storages}
        pieces: dict[UntypedStorage, list[int]] = {}
        packed: Counter[UntypedStorage] = Counter()
        for storage, size in sizes.items():
            whole = wholes.get(storage, storage)
            packed[whole] += size
            if whole is not storage:
                pieces.setdefault(whole, []).extend(self._pieces.get(storage, (size,)))
        for whole, those in pieces.items():
            self._pieces[whole] = tuple(those)
        return packed

    def _layout(self, sizes: Mapping[UntypedStorage, int]) -> tuple[int, ...]:
        """Sizes of the pieces that these storages are on the host."""
        pieces = (self._pieces.get(storage, (size,)) for storage, size in sizes.items())
        return tuple(itertools.chain.from_iterable(pieces))

    def _host_spans(self, storages: Iterable[UntypedStorage]) -> dict[UntypedStorage, Tensor]:
        """Where their contents are on the host, one uint8 for each."""
        storages = list(storages)
        counts = [len(self._pieces.get(storage, (0,))) for storage in storages]
        return dict(zip(storages, self._host_copy.joined_spans(counts), strict=True))

    def _device_pieces(self, sizes: Mapping[UntypedStorage, int]) -> Iterator[Tensor]:
        """uint8 for each piece."""
        for storage, size in sizes.items():
            yield from as_bytes(storage).split(self._pieces.get(storage, (size,)))

    def _device(self, storages: Iterable[UntypedStorage]) -> Device:
        devices = {storage.device for storage in storages} or {torch.device("cpu")}
        if len(devices) > 1:
            raise ResidencyError(
                f"{self.name} lies on {' and '.join(sorted(map(str, devices)))}; declare one "
                "component for each."
            )
        return self._device_of(devices.pop())

    def _is_on_host(self, sizes: Mapping[UntypedStorage, int]) -> bool:
        """Whether the host copy was made of these storages or, by another component, of equals."""
        copy = self._host_copy
        if copy.written_by is None:
            return False
        if copy.sizes == self._layout(sizes) and self._moved.issuperset(sizes):
            return True
        if copy.users <= {self.name}:
            return False
        self._require_same_layout(sizes)
        for piece, span in zip(self._device_pieces(sizes), copy.spans, strict=True):
            if not _samples_agree(piece, span):
                raise ResidencyError(
                    f"{self.name} does not hold what {copy.written_by} left on the host, but both "
                    f"are declared to hold the same (host_key {copy.host_key!r}). Give them keys "
                    "of their own, or load them from the same weights."
                )
        copy.users.add(self.name)
        return True

    def _require_same_layout(self, sizes: Mapping[UntypedStorage, int]) -> None:
        copy = self._host_copy
        others = sorted(copy.users - {self.name})
        layout = self._layout(sizes)
        if others and copy.sizes != layout:
            raise ResidencyError(
                f"{self.name} has {len(layout)} storages of {sum(layout)} bytes in all, but "
                f"{others[0]} left {len(copy.sizes)} of {copy.num_bytes} bytes under the same "
                f"host_key {copy.host_key!r}. Give them keys of their own."
            )

    def _start_copy(self, device: Device, sizes: Mapping[UntypedStorage, int]) -> None:
        copy = self._host_copy
        self._require_same_layout(sizes)
        others = sorted(copy.users - {self.name})
        if others and self._component.version() != FROZEN:
            raise ResidencyError(
                f"{self.name} is written, and {others[0]} relies on the same host copy "
                f"({copy.host_key!r}). Only weights that nobody writes can share one."
            )
        copy.lay_out(self._layout(sizes), self.name)
        copy.written_by = None  # until all of it is there
        try:
            device.copy_out(list(sizes), list(self._host_spans(sizes).values()))
        except BaseException:
            device.wait()  # some copies may have started
            raise

    def _complete_copy(self, device: Device) -> None:
        """The storages are emptied, and the host copy is read, only after this."""
        device.wait()
        self._host_copy.written_by = self.name
        self._host_copy.users.add(self.name)

    def _require_whole_copy(self) -> None:
        if self._host_copy.written_by is None:
            raise ResidencyError(
                f"the host copy of {self.name} is spoilt: another component with host_key "
                f"{self.host_key!r} failed while it wrote there. Resume from a checkpoint."
            )

    def _start_filling(
        self,
        device: Device,
        storages: Sequence[UntypedStorage],
        among: Iterable[UntypedStorage],
    ) -> None:
        if self.parking is Parking.DROP:
            for storage in storages:
                as_bytes(storage).fill_(0xFF)
            return
        spans = self._host_spans(among)
        device.copy_in([spans[storage] for storage in storages], storages)


class RebuiltPart:
    """Something of one role that frees itself and is built again."""

    parking = Parking.REBUILD
    on_demand = False

    def __init__(
        self, name: str, component: RebuiltComponent, before_parking: Callable[[], None]
    ) -> None:
        self.name = name
        self.host_key = name
        self.written_by = component.written_by
        self.is_resident = True
        self._component = component
        self._before_parking = before_parking

    def version(self) -> Version | Void:
        return Version(FROZEN)

    def num_bytes(self) -> int:
        return self._component.num_bytes()

    def host_bytes(self) -> int:
        return 0

    def park(self, *, copy: bool) -> Moved:
        """Nothing is ever copied, whatever `copy` says."""
        if not self.is_resident:
            return Moved(0)
        self._before_parking()
        dropped = self._component.drop()
        self.is_resident = False
        return Moved(0, dropped)

    def start_park(self, *, copy: bool) -> StartedMove:
        return StartedMove.at_once(partial(self.park, copy=copy))

    def unpark(self) -> Moved:
        if self.is_resident:
            return Moved(0)
        built = self._component.rebuild()
        self.is_resident = True
        return Moved(built)

    def start_unpark(self) -> StartedMove:
        return StartedMove.at_once(self.unpark)


def _samples_agree(device_bytes: Tensor, host_bytes: Tensor) -> bool:
    """Compares evenly spaced blocks, the first and the last among them; small storages whole."""
    last = host_bytes.numel() - SAMPLE_BYTES
    if last < SAMPLE_BYTES * NUM_SAMPLES:
        return torch.equal(device_bytes.cpu(), host_bytes)
    starts = (last * number // (NUM_SAMPLES - 1) for number in range(NUM_SAMPLES))
    return all(
        torch.equal(device_bytes[at : at + SAMPLE_BYTES].cpu(), host_bytes[at : at + SAMPLE_BYTES])
        for at in starts
    )
