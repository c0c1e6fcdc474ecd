"""When a run is saved, and how it is resumed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.checkpoint.state import Format, TrainerState, read_trainer_state, restore, write_state
from unirl.checkpoint.store import CheckpointStore
from unirl.checkpoint.together import save_together
from unirl.config.schema import RunConfig
from unirl.distributed.ranks import Ranks
from unirl.train.stack import TrainStack
from unirl.trainer.progress import Progress

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
    "optimizer_resident",
    "residency",
    "device_budget_gib",
    "overlap_moves",
    "host_budget_gib",
    "doctor",
    "save_reads",
    "save_interval",
    "save_dir",
    "save_mode",
    "save_format",
    "load_dir",
    "num_devices",
    "backend",
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
        ranks: Ranks,
    ) -> None:
        """`source` is the verified checkpoint folder to resume from."""
        self.wandb_run_id: str | None = None
        self.progress = Progress(config.num_devices)
        self._config = config
        self._stack = stack
        self._store = CheckpointStore(directory)
        self._source = source
        self._ranks = ranks
        lora = config.stack.lora is not None
        self._format = Format(
            adapter_only=config.save_mode == "adapter" or (config.save_mode == "auto" and lora),
            sharded=config.save_format == "sharded",
        )

    def restore(self) -> int:
        """Load the checkpoint to resume from; returns the rollout id to go on with."""
        if self._source is None:
            return 0
        source = self._source
        state = self._ranks.together(lambda: read_trainer_state(source))
        restore(source, self._stack, self._ranks)
        for line in changed_keys(state.config, self._config.model_dump(mode="json")):
            logger.warning("resuming with another setting than the run was saved with: %s", line)
        if state.progress:
            self.progress.resume(state.progress)
        else:
            logger.warning("the checkpoint knows no costs: progress/* counts from this resume on")
        logger.info("resumed from %s at rollout %d", self._source, state.rollouts_done)
        return state.rollouts_done

    @property
    def read_the_device(self) -> bool:
        """Whether a save needs the train stack on the device, as it does unless save_reads=host."""
        return self._config.save_reads == "device"

    def is_due(self, rollouts_done: int) -> bool:
        return self._config.save_is_due(rollouts_done)

    def save(self, rollouts_done: int) -> Path:
        """Write checkpoint-<rollouts_done>; see `read_the_device` for where the weights must be.

        All ranks together: rank 0 makes the folder and gives it its final name, once every rank
        has written its part. Raises CheckpointError on all ranks when one cannot write.
        """
        state = TrainerState(
            rollouts_done=rollouts_done,
            optimizer_step=self._stack.weight_version,
            wandb_run_id=self.wandb_run_id,
            config=self._config.model_dump(mode="json"),
            progress=self.progress.state(),
        )

        def write(folder: Path) -> None:
            write_state(folder, self._stack, state, self._format, self._ranks)

        path = save_together(self._store, rollouts_done, write, self._ranks)
        logger.info("saved %s", path)
        return path


def changed_keys(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key: old -> new` for every setting that differs and is not neutral."""
    old, new = flatten(saved), flatten(now)
    neutral = set(NEUTRAL_KEYS)
    if new["stack.scheduler.type"] != "constant" and new["stack.scheduler.total_steps"] is None:
        neutral.remove("num_rollouts")  # the learning rate ends with the run
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key.split(".")[0] not in neutral
    ]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
