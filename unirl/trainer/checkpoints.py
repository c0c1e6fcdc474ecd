"""When a run is saved, and how it is resumed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.checkpoint.state import TrainerState, read_trainer_state, restore, write_state
from unirl.checkpoint.store import CheckpointStore
from unirl.config.schema import RunConfig
from unirl.train.stack import TrainStack

logger = logging.getLogger("unirl.checkpoint")

NEUTRAL_KEYS = (
    "description",
    "run_name",
    "output_dir",
    "device",
    "num_threads",
    "num_rollouts",
    "train_resident",
    "rollout_resident",
    "reward_resident",
    "save_interval",
    "save_dir",
    "save_mode",
    "load_dir",
    "logging",
)
"""Keys that may differ on a resume without making it another run."""


class Checkpoints:
    """Saves the train stack on schedule and restores it from `load_dir`."""

    def __init__(
        self,
        config: RunConfig,
        stack: TrainStack,
        directory: Path,
        source: Path | None,
    ) -> None:
        """`source` is the verified checkpoint folder to resume from."""
        self.wandb_run_id: str | None = None
        self._config = config
        self._stack = stack
        self._store = CheckpointStore(directory)
        self._source = source
        lora = config.stack.lora is not None
        self._adapter_only = config.save_mode == "adapter" or (config.save_mode == "auto" and lora)

    def restore(self) -> int:
        """Load the checkpoint to resume from; returns the rollout id to go on with."""
        if self._source is None:
            return 0
        state = read_trainer_state(self._source)
        restore(self._source, self._stack)
        for line in changed_keys(state.config, self._config.model_dump(mode="json")):
            logger.warning("resuming with another setting than the run was saved with: %s", line)
        logger.info("resumed from %s at rollout %d", self._source, state.rollouts_done)
        return state.rollouts_done

    def is_due(self, rollouts_done: int) -> bool:
        """Every save_interval rollouts and after the last one; never with save_interval=0."""
        config = self._config
        return config.save_interval > 0 and (
            rollouts_done % config.save_interval == 0 or rollouts_done == config.num_rollouts
        )

    def save(self, rollouts_done: int) -> Path:
        """Write checkpoint-<rollouts_done>; the train stack must be on the device."""
        state = TrainerState(
            rollouts_done=rollouts_done,
            optimizer_step=self._stack.weight_version,
            wandb_run_id=self.wandb_run_id,
            config=self._config.model_dump(mode="json"),
        )
        path = self._store.save(
            rollouts_done,
            lambda folder: write_state(folder, self._stack, state, self._adapter_only),
        )
        logger.info("saved %s", path)
        return path


def changed_keys(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key: old -> new` for every setting that differs and is not neutral."""
    old, new = _flatten(saved), _flatten(now)
    neutral = set(NEUTRAL_KEYS)
    if new["stack.scheduler.type"] != "constant" and new["stack.scheduler.total_steps"] is None:
        neutral.remove("num_rollouts")  # the learning rate ends with the run
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key.split(".")[0] not in neutral
    ]


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
