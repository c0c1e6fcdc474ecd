"""Checks on one GPU that parking does what it promises, in one table.

Rates beside a copy from and to page-locked memory, bytes that parking gives back, that a frozen
base never crosses to the host again, that nothing grows, that training with parking between all
steps has the losses of training without; and a run beside its plan: moves, bytes and peaks. Takes
less than 4 minutes and 32 GiB of page-locked host memory. Exit code 0: all checks passed; 1: one
failed; 2: there is no GPU.

    python scripts/gpu_residency_check.py
    python scripts/gpu_residency_check.py --gib 2   # on a small GPU
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from unirl.cli.compose import compose_and_check
from unirl.core.components import FROZEN, Movable, TensorComponent
from unirl.memory.hostmem import GIB, HostArena, host_limit
from unirl.memory.movers import RoleWeights
from unirl.planning.compare import comparison, measured_peaks
from unirl.planning.hardware import make_target
from unirl.planning.plan import make_plan
from unirl.planning.scorers import scorer_components
from unirl.train.optimizer import moment_tensors

MIB = 2**20
LEAST_SHARE_OF_LIMIT = 0.9
NUM_CYCLES = 20
PEAK_TOLERANCE = 0.1
GATE = "diffusion/tiny/tiny_residency_gate"
LARGE = (
    "~eval_rewards",
    "reward=jpeg",
    "num_rollouts=3",
    "batch_size=64",
    "sampling.samples_per_prompt=16",
    "stack.micro_batch_size=1024",
)


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    measured: str
    wanted: str
    passed: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gib", type=float, default=8.0, help="size of the frozen base")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing was checked")
        return 2
    started = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, base of {args.gib} GiB")
    base = Base(args.gib, HostArena(host_limit(), pin=True))
    checks: list[Check] = []
    for group in (rates, freed_bytes, frozen_traffic, growth):
        checks += group(base)
    checks += losses()
    checks += plan_against_run()
    for check in checks:
        verdict = "ok" if check.passed else "FAILED"
        print(f"{check.name:44}{check.measured:>20}  {check.wanted:30}{verdict}")
    print(f"{time.perf_counter() - started:.0f} s")
    return 0 if all(check.passed for check in checks) else 1


class Base:
    """Frozen weights on the GPU, and a page-locked arena to park them in."""

    def __init__(self, gib: float, host: HostArena, name: str = "base") -> None:
        count = max(1, round(gib * GIB / (64 * MIB)))
        self.tensors = [
            torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(count)
        ]
        for tensor in self.tensors:
            tensor.random_(0, 256)
        self.num_bytes = count * 64 * MIB
        self.host = host
        declared = TensorComponent(name, lambda: self.tensors, lambda: FROZEN)
        self.part: Movable = RoleWeights([declared], self.host).parts[0]

    def digest(self) -> list[int]:
        return [int(tensor.view(torch.int64).sum()) for tensor in self.tensors]


# --- the checks -----------------------------------------------------------------------------------


def rates(base: Base) -> Iterator[Check]:
    """Both ways against one copy of 1 GiB of page-locked memory."""
    before = base.digest()
    first = seconds(lambda: base.part.park(copy=True))
    base.part.unpark()
    out = base.num_bytes / min(timed_park(base) for _ in range(3))
    inward = base.num_bytes / min(timed_unpark(base) for _ in range(3))
    limit_out, limit_in = link_rates()
    made = base.num_bytes / first / 1e9
    yield Check("first park, with page-locking", f"{made:.1f} GB/s", "", True)
    yield against_limit("park", out, limit_out)
    yield against_limit("unpark", inward, limit_in)
    pinned = base.host.copy_of("base").spans[0].is_pinned()
    yield Check("host copy is page-locked", str(pinned), "True", pinned)
    yield from swap_rates(base)
    same = base.digest() == before
    yield Check("bytes after all round trips", "equal" if same else "differ", "equal", same)


def swap_rates(base: Base) -> Iterator[Check]:
    """The base leaves while another of its size comes: in turn, and with copies at once."""
    leaving, coming = base.part, Base(base.num_bytes / GIB, base.host, "other").part
    coming.park(copy=True)
    best = {in_turn: math.inf, at_once: math.inf}
    for _ in range(2):
        for swap in best:
            best[swap] = min(best[swap], seconds(partial(swap, leaving, coming)))
            leaving, coming = coming, leaving
    after, together = (2 * base.num_bytes / taken / 1e9 for taken in best.values())
    name, gain = "swap: GB/s in turn, at once, gain", together / after
    yield Check(name, f"{after:.1f} {together:.1f} {gain:.2f}", "gain > 1", gain > 1)


def in_turn(leaving: Movable, coming: Movable) -> None:
    leaving.park(copy=True)
    coming.unpark()


def at_once(leaving: Movable, coming: Movable) -> None:
    out, back = leaving.start_park(copy=True), coming.start_unpark()
    back.finish()
    out.finish()


def against_limit(move: str, rate: float, limit: float) -> Check:
    return Check(
        f"{move}: GB/s, limit, share",
        f"{rate / 1e9:.1f} {limit / 1e9:.1f} {rate / limit:.2f}",
        f"share >= {LEAST_SHARE_OF_LIMIT}",
        rate >= LEAST_SHARE_OF_LIMIT * limit,
    )


def timed_park(base: Base) -> float:
    taken = seconds(lambda: base.part.park(copy=True))
    base.part.unpark()
    return taken


def timed_unpark(base: Base) -> float:
    base.part.park(copy=False)
    return seconds(base.part.unpark)


def link_rates() -> tuple[float, float]:
    """Bytes per second out and in, best of 5."""
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    out = min(seconds(lambda: host.copy_(there, non_blocking=True)) for _ in range(5))
    inward = min(seconds(lambda: there.copy_(host, non_blocking=True)) for _ in range(5))
    return GIB / out, GIB / inward


def freed_bytes(base: Base) -> Iterator[Check]:
    """What the allocator and the driver say was given back."""
    allocated, free = torch.cuda.memory_allocated(), free_memory()
    base.part.park(copy=False)
    given = allocated - torch.cuda.memory_allocated()
    driver = free_memory() - free
    base.part.unpark()
    exact = f"{base.num_bytes / GIB:.3f} GiB"
    yield Check(
        "allocator: bytes given back", f"{given / GIB:.3f} GiB", exact, given == base.num_bytes
    )
    yield Check(
        "driver: bytes given back",
        f"{driver / GIB:.3f} GiB",
        f"at least 98 % of {exact}",
        driver >= 0.98 * base.num_bytes,
    )


def free_memory() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def frozen_traffic(base: Base) -> Iterator[Check]:
    """The profiler sees no copy to the host while a frozen base is parked again."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        moved = base.part.park(copy=False)
        torch.cuda.synchronize()
    out = sum(event.count for event in trace.key_averages() if "DtoH" in event.key)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        base.part.unpark()
        torch.cuda.synchronize()
    inward = sum(event.count for event in trace.key_averages() if "HtoD" in event.key)
    yield Check("frozen base: bytes parked again", str(moved.num_bytes), "0", moved.num_bytes == 0)
    yield Check("frozen base: copies out, profiled", str(out), "0", out == 0)
    yield Check("the profiler does see copies in", str(inward), "more than 0", inward > 0)


def growth(base: Base) -> Iterator[Check]:
    """Device memory, host blocks and the process stay as large as they are over cycles."""
    before = sizes(base)
    for _ in range(NUM_CYCLES):
        base.part.park(copy=True)
        base.part.unpark()
    for name, old, new in zip(
        ("device", "host blocks", "process"), before, sizes(base), strict=True
    ):
        slack = 64 * MIB if name == "process" else 0
        yield Check(
            f"{name}: growth over {NUM_CYCLES} cycles",
            f"{(new - old) / MIB:.1f} MiB",
            f"at most {slack // MIB} MiB",
            new - old <= slack,
        )


def sizes(base: Base) -> tuple[int, int, int]:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), base.host.num_bytes, psutil.Process().memory_info().rss


def losses() -> Iterator[Check]:
    """Bit for bit the same training, with and without parking between its steps."""
    resident, parked = train(parks=False), train(parks=True)
    same = resident == parked
    yield Check(
        "losses, parked against resident", "equal" if same else "differ", "equal in all bits", same
    )
    falls = resident[-1] < resident[0]
    yield Check(
        "that training learns", f"{resident[0]:.3f} -> {resident[-1]:.3f}", "the loss falls", falls
    )


def plan_against_run() -> Iterator[Check]:
    """The gate with batches that fill hundreds of MiB, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"output_dir={folder}", "run_name=run", "device=cuda", *LARGE]
        command = [sys.executable, "-m", "unirl.train_diffusion", GATE, *words]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        yield Check(
            "a run with all roles parked", f"exit {ran.returncode}", "exit 0", not ran.returncode
        )
        if ran.returncode:
            print(ran.stderr[-2000:])
            return
        config, _ = compose_and_check(GATE, words)
        plan = make_plan(
            config, make_target(config), scorer_components(config), config.num_rollouts
        )
        directory = Path(folder) / "run"
        lines, is_equal = comparison(plan, directory)
        yield Check(
            "its moves and their bytes", "equal" if is_equal else "differ", "equal", is_equal
        )
        print("\n".join(lines))
        measured = measured_peaks(directory)
        for peak in plan.peaks:
            ratio = measured.get(peak.kind.value, 0) / peak.total_bytes
            name = f"{peak.kind.value}: measured / planned peak"
            yield Check(name, f"{ratio:.3f}", "0.9 to 1.1", abs(ratio - 1) <= PEAK_TOLERANCE)


class LoraLinear(nn.Module):
    """A frozen layer and a trained adapter of rank 8."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(width, 8, bias=False)
        self.up = nn.Linear(8, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x.bfloat16()).float() + self.up(self.down(x)))


def train(*, parks: bool) -> list[float]:
    torch.manual_seed(0)
    network = nn.Sequential(*(LoraLinear(1024) for _ in range(4))).cuda()
    trained = [p for p in network.parameters() if p.requires_grad]
    frozen = [p for p in network.parameters() if not p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    inputs, targets = torch.randn(2, 64, 1024, device="cuda")
    found: list[float] = []
    parts = RoleWeights(
        [
            TensorComponent("base", lambda: frozen, lambda: FROZEN),
            TensorComponent("adapter", lambda: trained, lambda: len(found)),
            TensorComponent("moments", lambda: moment_tensors(optimizer), lambda: len(found)),
        ],
        HostArena(host_limit(), pin=True),
    ).parts
    for _ in range(NUM_CYCLES):
        loss = (network(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.item())
        if parks:
            there_and_back(parts)
    return found


def there_and_back(parts: Sequence[Movable]) -> None:
    for part in parts:
        part.park(copy=part.name != "base" or part.host_bytes() == 0)
    for part in parts:
        part.unpark()


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
