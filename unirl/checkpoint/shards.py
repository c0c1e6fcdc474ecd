"""Weights and optimizer moments in shards: every rank writes what it holds (torch's DCP).

The folder `shards` of a checkpoint is read into tensors of any layout, so a run can be resumed on
another number of ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

SHARDS = "shards"


def write_shards(folder: Path, tensors: Mapping[str, Tensor], *, alone: bool) -> None:
    """Write this rank's part of `tensors` into `folder / SHARDS`. All ranks together."""
    writer = dcp.FileSystemWriter(folder / SHARDS, single_file_per_rank=True)
    try:
        with _quiet():
            dcp.save(dict(tensors), storage_writer=writer, no_dist=alone)
    except CheckpointException as error:  # names the ranks only; what went wrong is inside
        cause, _ = next(iter(error.failures.values()))
        raise cause from error


def read_shards(folder: Path, tensors: Mapping[str, Tensor], *, alone: bool) -> None:
    """Overwrite `tensors` in place with what a checkpoint holds under their names.

    All ranks together. Raises ValueError when names or shapes differ; nothing is written then.
    """
    reader = dcp.FileSystemReader(folder / SHARDS)
    entries = reader.read_metadata().state_dict_metadata
    saved = {name: e for name, e in entries.items() if isinstance(e, TensorStorageMetadata)}
    missing = sorted(tensors.keys() - saved.keys())
    unexpected = sorted(saved.keys() - tensors.keys())
    misshapen = [
        f"{name}: saved {tuple(saved[name].size)}, here {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in saved and tuple(saved[name].size) != tuple(tensor.shape)
    ]
    if missing or unexpected or misshapen:
        raise ValueError(
            f"missing {missing[:3]}, unexpected {unexpected[:3]}, wrong shape {misshapen[:3]}. It "
            "needs the model.path, stack.lora and save_mode of the run that saved it."
        )
    with _quiet():
        dcp.load(dict(tensors), storage_reader=reader, no_dist=alone)


def read_shard_group(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Whole tensors on the CPU of a checkpoint's names that begin with `prefix`, without it."""
    reader = dcp.FileSystemReader(folder / SHARDS)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
    }
    with _quiet():
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """One process alone is meant; torch would warn that it assumes so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def shard_names(folder: Path) -> set[str]:
    """Names of the tensors of a checkpoint."""
    return set(dcp.FileSystemReader(folder / SHARDS).read_metadata().state_dict_metadata)
