"""What a checkpoint holds, and putting it back: weights, optimizer, and where the run stood.

    weights.safetensors   trained weights, or the whole network with save_mode=full
    shadows.safetensors   shadow weights, where the algorithm keeps some
    optimizer.pt          AdamW state
    shards/               instead of these three, with save_format=sharded
    trainer_state.json    rollouts done, weight version, what it cost, tracker id, configuration,
                          evaluation, digests of the files it read, versions of packages

Nothing else is needed for an exact resume: prompts, noise and SDE steps are functions of the seed
and the rollout id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from unirl.checkpoint.shards import (
    SHARDS,
    read_shard_group,
    read_shards,
    shard_names,
    write_shards,
)
from unirl.core.errors import CheckpointError, ModelError
from unirl.distributed.ranks import Ranks

SHADOW_FILE = "shadows.safetensors"
_SHADOW_GROUP = "shadow."
"""Begins their names in shards; `<shadow>.<parameter>` follows, the names of the file."""
NO_SHADOW = "none"
"""In place of a shadow's name: the trained weights."""
_UNREADABLE = (OSError, SafetensorError, RuntimeError, ValueError)


@dataclass(frozen=True)
class TrainerState:
    """Where a run stood when it was saved."""

    rollouts_done: int
    optimizer_step: int
    wandb_run_id: str | None
    config: Mapping[str, Any]
    """The resolved configuration, to tell what differs when resuming."""
    progress: Mapping[str, float] = field(default_factory=dict)
    """`trainer.progress`; empty in a checkpoint that is older than it."""
    identity: Mapping[str, str] = field(default_factory=dict)
    """`checkpoint.identity`, for the same purpose."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    """What an evaluation of these very weights gave; empty where there was none."""


class Saveable(Protocol):
    """The trained weights' side; its methods are entered by all ranks together."""

    def state_tensors(self, adapter_only: bool) -> dict[str, Tensor]: ...

    def shadow_tensors(self) -> dict[str, Tensor]: ...

    def optimizer_state(self) -> dict[str, Any]: ...

    def load_state(
        self,
        tensors: Mapping[str, Tensor],
        shadows: Mapping[str, Tensor],
        optimizer_state: Mapping[str, Any],
    ) -> None: ...

    def sharded_state(self, adapter_only: bool) -> dict[str, Tensor]: ...

    def finish_sharded_load(self, num_steps: int) -> None: ...


@dataclass(frozen=True)
class Format:
    """How weights and optimizer are written."""

    adapter_only: bool
    sharded: bool


def write_state(
    folder: Path, trained: Saveable, state: TrainerState, form: Format, ranks: Ranks
) -> None:
    """Write the files of one checkpoint into an empty folder. All ranks together."""
    if form.sharded:
        tensors = trained.sharded_state(form.adapter_only)
        write_shards(folder, tensors, alone=ranks.world_size == 1)
    else:
        weights, optimizer = trained.state_tensors(form.adapter_only), trained.optimizer_state()
        shadows = trained.shadow_tensors()
        if ranks.is_main:
            save_file(weights, folder / "weights.safetensors")
            if shadows:
                save_file(shadows, folder / SHADOW_FILE)
            torch.save(optimizer, folder / "optimizer.pt")
    if ranks.is_main:
        text = json.dumps(asdict(state), indent=1) + "\n"
        (folder / "trainer_state.json").write_text(text)


def read_trainer_state(folder: Path) -> TrainerState:
    """Where the run of a verified checkpoint folder stood."""
    try:
        return TrainerState(**json.loads((folder / "trainer_state.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"load_dir: {folder}/trainer_state.json: {error}") from error


def read_weights(folder: Path, shadow: str | None) -> dict[str, Tensor]:
    """The weights of a verified checkpoint folder by parameter name, or those of a shadow.

    Raises CheckpointError when they cannot be read, or there is no such shadow.
    """
    if shadow is not None and shadow not in (names := shadow_names(folder)):
        has = f"only {', '.join(names)}" if names else "none"
        raise CheckpointError(
            f"{folder} has no shadow weights {shadow!r}: it has {has}. Name one that is "
            "there, or take the trained weights with --shadow none."
        )
    file, prefix = ("weights.safetensors", "") if shadow is None else (SHADOW_FILE, f"{shadow}.")
    group = "weights." if shadow is None else f"{_SHADOW_GROUP}{shadow}."
    try:
        if (folder / SHARDS).is_dir():
            return read_shard_group(folder, group)
        tensors = load_file(folder / file)
    except _UNREADABLE as error:
        raise CheckpointError(f"{folder}: weights cannot be read: {error}") from error
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def shadow_names(folder: Path) -> list[str]:
    """Of the shadow weights in a verified checkpoint folder."""
    try:
        if (folder / SHARDS).is_dir():
            saved = shard_names(folder)
            keys = {n.removeprefix(_SHADOW_GROUP) for n in saved if n.startswith(_SHADOW_GROUP)}
        elif (folder / SHADOW_FILE).is_file():
            with safe_open(folder / SHADOW_FILE, framework="pt") as file:
                keys = set(file.keys())
        else:
            keys = set()
    except _UNREADABLE as error:
        raise CheckpointError(f"{folder}: shadow weights cannot be read: {error}") from error
    return sorted({key.partition(".")[0] for key in keys})


def restore(folder: Path, trained: Saveable, ranks: Ranks) -> None:
    """Load weights and optimizer of a verified checkpoint folder into the trained ones.

    All ranks together. Raises CheckpointError when they cannot be read or belong to another model.
    """
    try:
        if (folder / SHARDS).is_dir():
            _restore_shards(folder, trained, ranks)
            return
        tensors = load_file(folder / "weights.safetensors")
        optimizer_state = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
        shadows = folder / SHADOW_FILE
        trained.load_state(
            tensors, load_file(shadows) if shadows.is_file() else {}, optimizer_state
        )
    except (OSError, SafetensorError, RuntimeError, ModelError, ValueError) as error:
        raise CheckpointError(f"load_dir: {folder} does not fit this run: {error}") from error


def _restore_shards(folder: Path, trained: Saveable, ranks: Ranks) -> None:
    """Into the trained weights or, where the checkpoint has it, the whole network."""
    tensors = trained.sharded_state(adapter_only=True)
    if tensors.keys() != shard_names(folder):
        tensors = trained.sharded_state(adapter_only=False)
    read_shards(folder, tensors, alone=ranks.world_size == 1)
    trained.finish_sharded_load(read_trainer_state(folder).optimizer_step)
