"""GB/s of parking and unparking weights, beside plain copies of the same bytes in the same run.

Three kinds of weights: a frozen base in large tensors, a LoRA adapter with its moments, and many
small tensors. Three limits, between memory that is there already unless it says else:

    flat   one copy of all bytes: a memcpy, or on a GPU a copy from or to page-locked memory
    each   a copy for each tensor: what their number and their places in memory cost
    fresh  CPU only: one memcpy whose source is freed afterwards (park), or whose target was never
           touched (unpark)

On a CPU, device and host are the same RAM. A park returns the storages' pages to the kernel there,
and an unpark gets pages that the kernel must find and clear first, which takes about as long as
the copy, or several times as long where it has no huge pages: hence `fresh`. One thread, best of
all repeats.

Last, a swap: one half of the base leaves while the other comes, one after the other and with copies
both ways at once. On a CPU a copy is complete when it has started, so there is nothing to gain.

    python scripts/bench_moves.py                     # under a minute and 5 GiB on a CPU
    python scripts/bench_moves.py --gib 8 --repeats 5
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from functools import partial

import numpy as np
import torch

from unirl.core.components import FROZEN, Movable, TensorComponent
from unirl.memory.hostmem import GIB, HostArena, host_limit
from unirl.memory.movers import RoleWeights

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Weights:
    """Tensors of one kind: their sizes in bytes."""

    name: str
    sizes: list[int]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the frozen base")
    parser.add_argument("--repeats", type=int, default=5, help="moves each way; the best counts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{place}, GB/s, best of {args.repeats}; after each limit: ours / limit")
    print(f"{'':32}{'ours':>7}{'flat':>7}{'':7}{'each':>7}{'':7}{'fresh':>7}")
    for weights in kinds(args.gib):
        measure(weights, device, args.repeats)
    measure_swap(args.gib / 2, device, args.repeats)


def kinds(gib: float) -> Iterable[Weights]:
    yield Weights("frozen base", [64 * MIB] * max(1, round(gib * GIB / (64 * MIB))))
    # Rank 32 at width 1536: A and B of 240 matrices in float32, and two moments of each.
    yield Weights("adapter and moments", [32 * 1536 * 4] * (240 * 2 * 3))
    yield Weights("small tensors of 8 KiB", [8 * KIB] * 16_384)


@dataclass(frozen=True)
class Seconds:
    """One round of moves and of the copies they are held against."""

    park: float
    unpark: float
    drop: float
    flat_out: float
    flat_in: float
    each_out: float
    each_in: float
    fresh_out: float
    fresh_in: float


def measure(weights: Weights, device: torch.device, repeats: int) -> None:
    """Print a row each way, and what the first park and a park without a copy take."""
    tensors = [torch.ones(size, dtype=torch.uint8, device=device) for size in weights.sizes]
    host = HostArena(host_limit(), pin=device.type == "cuda")
    declared = TensorComponent(weights.name, lambda: tensors, lambda: FROZEN)
    (part,) = RoleWeights([declared], host).parts
    first = seconds(lambda: part.park(copy=True))
    part.unpark()
    rounds = [one_round(part, weights, device) for _ in range(repeats)]
    best = Seconds(*(min(column) for column in zip(*map(astuple, rounds), strict=True)))
    outward = best.flat_out, best.each_out, best.fresh_out
    inward = best.flat_in, best.each_in, best.fresh_in
    print_row(weights.name, "park", weights.num_bytes, best.park, outward)
    print_row("", "unpark", weights.num_bytes, best.unpark, inward)
    print(
        f"  {weights.num_bytes / GIB:.2f} GiB in {len(weights.sizes)} tensors. First park, with "
        f"making the host memory: {first * 1e3:.0f} ms. Without a copy: {best.drop * 1e3:.1f} ms."
    )


def one_round(part: Movable, weights: Weights, device: torch.device) -> Seconds:
    park, unpark = seconds(lambda: part.park(copy=True)), seconds(part.unpark)
    drop = seconds(lambda: part.park(copy=False))
    part.unpark()
    flat, each = copies([weights.num_bytes], device), copies(weights.sizes, device)
    fresh = no_fresh_memory if device.type == "cuda" else fresh_on_cpu
    return Seconds(park, unpark, drop, *flat, *each, *fresh(weights.num_bytes))


def measure_swap(gib: float, device: torch.device, repeats: int) -> None:
    """Print GB/s, both ways together, of exchanging two components of this size."""
    host = HostArena(host_limit(), pin=device.type == "cuda")
    sizes = [64 * MIB] * max(1, round(gib * GIB / (64 * MIB)))
    leaving, coming = (some_part(name, sizes, host, device) for name in ("leaving", "coming"))
    for part in (leaving, coming):
        part.park(copy=True)
    leaving.unpark()
    best = {one_after_the_other: math.inf, at_once: math.inf}
    for _ in range(repeats):
        for swap in best:
            best[swap] = min(best[swap], seconds(partial(swap, leaving, coming)))
            leaving, coming = coming, leaving
    after, together = (2 * sum(sizes) / taken / 1e9 for taken in best.values())
    name = f"swap, {sum(sizes) / GIB:.2f} GiB each way"
    print(f"{name:32}{after:7.1f} one after the other, {together:.1f} at once", end="")
    print(f" ({together / after:.2f})")


def some_part(name: str, sizes: list[int], host: HostArena, device: torch.device) -> Movable:
    tensors = [torch.ones(size, dtype=torch.uint8, device=device) for size in sizes]
    return RoleWeights([TensorComponent(name, lambda: tensors, lambda: FROZEN)], host).parts[0]


def one_after_the_other(leaving: Movable, coming: Movable) -> None:
    leaving.park(copy=True)
    coming.unpark()


def at_once(leaving: Movable, coming: Movable) -> None:
    out, back = leaving.start_park(copy=True), coming.start_unpark()
    back.finish()
    out.finish()


def copies(sizes: list[int], device: torch.device) -> tuple[float, float]:
    """Seconds out and in: tensors of these sizes and their places in one block of the host."""
    there = [torch.ones(size, dtype=torch.uint8, device=device) for size in sizes]
    block = torch.ones(sum(sizes), dtype=torch.uint8)
    host = list((block.pin_memory() if device.type == "cuda" else block).split(sizes))
    return (
        seconds(lambda: torch._foreach_copy_(host, there, non_blocking=True)),
        seconds(lambda: torch._foreach_copy_(there, host, non_blocking=True)),
    )


def fresh_on_cpu(num_bytes: int) -> tuple[float, float]:
    """Seconds out and in: a memcpy and freeing its source; taking new memory and a memcpy.

    numpy asks for huge pages as the movers do.
    """
    host, leaving = np.ones(num_bytes, np.uint8), [np.ones(num_bytes, np.uint8)]
    arrived = []

    def leave() -> None:
        np.copyto(host, leaving[0])
        leaving.clear()

    def arrive() -> None:
        arrived.append(np.empty(num_bytes, np.uint8))
        np.copyto(arrived[0], host)

    return seconds(leave), seconds(arrive)


def no_fresh_memory(num_bytes: int) -> tuple[float, float]:
    """A GPU's memory needs no page faults: there is one limit."""
    return math.nan, math.nan


def seconds(work: Callable[[], object]) -> float:
    """Until the device is done too."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def print_row(name: str, move: str, num_bytes: int, ours: float, limits: tuple[float, ...]) -> None:
    gb = num_bytes / 1e9
    columns = "".join(f"{gb / limit:7.1f}{limit / ours:7.2f}" for limit in limits)
    print(f"{name:24}{move:8}{gb / ours:7.1f}{columns}")


if __name__ == "__main__":
    main()
