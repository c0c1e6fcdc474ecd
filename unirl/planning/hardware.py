"""Devices a plan can be made for: memory, and how fast weights get there.

Memory is what `nvidia-smi` reports as total. Rates are for page-locked host memory over the card's
PCIe generation: 24 GB/s on Gen4 x16 (A100 and L20 measure 23.5 to 24.8) and 48 GB/s on Gen5 x16
(H20 measures 47.8 to 52.6 for whole models), the same both ways. Another machine may have fewer
lanes, a shared switch, or faster links; the command takes rates of your own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from unirl.config.schema import RunConfig
from unirl.core.errors import ConfigError

GIB = 2**30
MIB = 2**20
GEN4, GEN5 = 24e9, 48e9


@dataclass(frozen=True)
class Gpu:
    """One device and its link."""

    memory_bytes: int
    bytes_per_second: float


GPUS = {
    "a100-40g": Gpu(40960 * MIB, GEN4),
    "a100-80g": Gpu(81920 * MIB, GEN4),
    "h100-80g": Gpu(81559 * MIB, GEN5),
    "h200": Gpu(143771 * MIB, GEN5),
    "h20-96g": Gpu(97871 * MIB, GEN5),
    "b200": Gpu(183359 * MIB, GEN5),
    "l40s": Gpu(46068 * MIB, GEN4),
    "rtx4090": Gpu(24564 * MIB, GEN4),
    "rtx5090": Gpu(32607 * MIB, GEN5),
}


@dataclass(frozen=True)
class Target:
    """What a plan must fit into."""

    name: str
    memory_bytes: int | None
    """Of the device; None: nobody said."""
    reserve_bytes: int
    """Left for the CUDA context, kernels' own workspaces and the allocator's rounding."""
    host_bytes: int | None
    """What parked weights may take in one process; None: nobody said."""
    onload_rate: float
    """Bytes per second to the device."""
    offload_rate: float

    @property
    def budget_bytes(self) -> int | None:
        return None if self.memory_bytes is None else self.memory_bytes - self.reserve_bytes


def reserve(memory_bytes: int) -> int:
    """A tenth of the memory, since workspace is estimated; at least 2 GiB, at most a fifth."""
    return min(max(memory_bytes // 10, 2 * GIB), memory_bytes // 5)


def make_target(
    config: RunConfig,
    gpu: str | None = None,
    budget_gib: float | None = None,
    host_gib: float | None = None,
    rate: float | None = None,
) -> Target:
    """What `config` must fit into: `budget_gib` where it is given, else the smaller of the GPU's
    memory less a reserve and the recipe's own device_budget_gib.

    `rate`: GB/s both ways instead of the GPU's. Raises ConfigError for an unknown GPU and for
    numbers that are not above 0.
    """
    for option, value in {"budget-gib": budget_gib, "host-gib": host_gib, "link-gb": rate}.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{option} {value:g}: it must be a number above 0.")
    host_gib = config.host_budget_gib if host_gib is None else host_gib
    own_gib = config.device_budget_gib
    if gpu is not None and gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu} is not known; known: {', '.join(GPUS)}. Use --budget-gib.")
    known = GPUS[gpu] if gpu is not None else None
    rate_bytes = rate * 1e9 if rate is not None else known.bytes_per_second if known else GEN4
    host_bytes = None if host_gib is None else int(host_gib * GIB)
    if budget_gib is not None:
        memory, kept_free, name = int(budget_gib * GIB), 0, f"{budget_gib:g} GiB"
    elif known is not None:
        memory, kept_free, name = known.memory_bytes, reserve(known.memory_bytes), str(gpu)
        if own_gib is not None and own_gib * GIB < memory - kept_free:
            memory, kept_free = int(own_gib * GIB), 0
            name = f"{gpu}, of which device_budget_gib leaves {own_gib:g} GiB"
    elif own_gib is not None:
        memory, kept_free, name = int(own_gib * GIB), 0, f"device_budget_gib={own_gib:g}"
    else:
        memory, kept_free, name = None, 0, "a device of any size"
    return Target(name, memory, kept_free, host_bytes, rate_bytes, rate_bytes)
