"""Many ranks over torch.distributed, started by a launcher that sets RANK and WORLD_SIZE.

Objects and barriers go over a gloo group on the CPU, so a waiting rank never occupies its GPU;
weights and gradients go over the default group, NCCL on GPUs and gloo on CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unirl.core.errors import ConfigError
from unirl.distributed.ranks import OneRank, Ranks

T = TypeVar("T")

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
JOIN_TIMEOUT = timedelta(minutes=10)
"""How long the first rank waits for the last one to come up; also NCCL's own watchdog."""
OBJECTS_TIMEOUT = timedelta(hours=12)
"""Others may wait this long while one rank writes a large checkpoint or asks a slow reward; that a
rank is gone is noticed by `distributed.watch`, not by this."""


class GroupRanks(Ranks):
    """One of the processes of torch's default group."""

    def __init__(self, objects: dist.ProcessGroup) -> None:
        """`objects`: a gloo group of all ranks."""
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._objects = objects

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._objects)
        return values

    def broadcast(self, value: T) -> T:
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._objects)
        return values[0]

    def barrier(self) -> None:
        dist.barrier(group=self._objects)


def launched_world_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many processes a launcher started, this one among them; None without a launcher."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    return int(environment["WORLD_SIZE"])


def require_local_devices(num_devices: int, device_name: str) -> None:
    """Raise ConfigError unless this machine has a GPU for each rank, or the run is on the CPU."""
    if device_name == "cpu" or (device_name == "auto" and not torch.cuda.is_available()):
        return
    found = torch.cuda.device_count()
    if found < num_devices:
        fewer = f"Set num_devices to {found} or less, start" if found else "Start"
        raise ConfigError(
            f"num_devices is {num_devices}, but this machine has {found or 'no'} GPUs. {fewer} "
            "the ranks with torchrun on several machines, or set device=cpu."
        )


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks of this run; the process group lives as long as the context.

    Needs no configuration, so that whatever is wrong with one rank's can be told to all.
    """
    if launched_world_size() in (None, 1):
        yield OneRank()
        return
    missing = [name for name in LAUNCH_VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(
            f"RANK is set but {', '.join(missing)} is not: start the ranks with torchrun, or with "
            "`unirl train ... num_devices=N`."
        )
    with_gpus = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if with_gpus else "gloo", timeout=JOIN_TIMEOUT)
    try:
        objects = dist.new_group(backend="gloo", timeout=OBJECTS_TIMEOUT)
        assert isinstance(objects, dist.ProcessGroup)
        yield GroupRanks(objects)
    except BaseException:
        if not with_gpus:  # NCCL would wait for ranks that may be gone
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def take_device(num_devices: int, device_name: str, ranks: Ranks) -> None:
    """Make `cuda` mean this rank's GPU.

    Raises ConfigError when it has none, or the launcher started other than num_devices processes.
    """
    if ranks.world_size != num_devices:
        started = "1 process" if ranks.world_size == 1 else f"{ranks.world_size} processes"
        raise ConfigError(
            f"num_devices is {num_devices}, but the launcher started {started}. "
            f"Set num_devices={ranks.world_size}, or start {num_devices} ranks."
        )
    on_gpu = device_name == "cuda" or (device_name == "auto" and torch.cuda.is_available())
    if ranks.world_size == 1 or not on_gpu:
        return
    local_rank, found = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local_rank >= found:
        raise ConfigError(
            f"this machine has {found} GPUs, but the launcher started at least {local_rank + 1} "
            "ranks on it. Start as many ranks as there are GPUs, or set device=cpu."
        )
    torch.cuda.set_device(local_rank)
