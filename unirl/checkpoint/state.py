"""What a checkpoint holds, and putting it back: weights, optimizer, and where the run stood.

    weights.safetensors   trained weights, or the whole network with save_mode=full
    optimizer.pt          AdamW state
    trainer_state.json    rollouts done, weight version, tracker id, the run's configuration

Nothing else is needed for an exact resume: prompts, noise and SDE steps are functions of the seed
and the rollout id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from unirl.core.errors import CheckpointError, ModelError


@dataclass(frozen=True)
class TrainerState:
    """Where a run stood when it was saved."""

    rollouts_done: int
    optimizer_step: int
    wandb_run_id: str | None
    config: Mapping[str, Any]
    """The resolved configuration, to tell what differs when resuming."""


class Saveable(Protocol):
    """The train stack's side."""

    def state_tensors(self, adapter_only: bool) -> dict[str, Tensor]: ...

    def optimizer_state(self) -> dict[str, Any]: ...

    def load_state(
        self, tensors: Mapping[str, Tensor], optimizer_state: Mapping[str, Any]
    ) -> None: ...


def write_state(folder: Path, stack: Saveable, state: TrainerState, adapter_only: bool) -> None:
    """Write the files of one checkpoint into an empty folder."""
    save_file(stack.state_tensors(adapter_only), folder / "weights.safetensors")
    torch.save(stack.optimizer_state(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps(asdict(state), indent=1) + "\n")


def read_trainer_state(folder: Path) -> TrainerState:
    """Where the run of a verified checkpoint folder stood."""
    try:
        return TrainerState(**json.loads((folder / "trainer_state.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"load_dir: {folder}/trainer_state.json: {error}") from error


def restore(folder: Path, stack: Saveable) -> None:
    """Load weights and optimizer of a verified checkpoint folder into the stack.

    Raises CheckpointError when they cannot be read or belong to another model.
    """
    try:
        tensors = load_file(folder / "weights.safetensors")
        optimizer_state = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
        stack.load_state(tensors, optimizer_state)
    except (OSError, SafetensorError, RuntimeError, ModelError, ValueError) as error:
        raise CheckpointError(f"load_dir: {folder} does not fit this run: {error}") from error
