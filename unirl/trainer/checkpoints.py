"""When a run is saved, which checkpoints stay, and how it is resumed."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from unirl.checkpoint.changes import changes
from unirl.checkpoint.identity import differences, identity
from unirl.checkpoint.state import Format, TrainerState, read_trainer_state, restore, write_state
from unirl.checkpoint.store import CheckpointStore
from unirl.checkpoint.together import save_together
from unirl.config.schema import RunConfig
from unirl.core.errors import CheckpointError, ConfigError
from unirl.distributed.ranks import Ranks
from unirl.train.weights import TrainedWeights
from unirl.trainer.comparable import evaluation_changes
from unirl.trainer.progress import Progress

logger = logging.getLogger("unirl.checkpoint")


class Checkpoints:
    """Saves the trained weights on schedule and restores it from where the run begins."""

    def __init__(
        self,
        config: RunConfig,
        weights: TrainedWeights,
        directory: Path,
        source: Path | None,
        ranks: Ranks,
        *,
        starting_weights: Callable[[], Mapping[str, Tensor]] | None = None,
        records: Callable[[], Sequence[Path]] = tuple,
    ) -> None:
        """`source` is the verified checkpoint folder to resume from; without one a run begins with
        what `starting_weights` gives, or with the model's own. `records` gives the files that a
        power cut must not take back behind a checkpoint."""
        self.wandb_run_id: str | None = None
        self.progress = Progress(config.num_devices)
        self.evaluation_changes: tuple[str, ...] = ()
        """Why evaluations from here on cannot be compared with those before the resume."""
        self._identity = identity(config)
        self._config = config
        self._weights = weights
        self._store = CheckpointStore(directory)
        self._source = source
        self._ranks = ranks
        self._starting_weights = starting_weights
        self._records = records
        self._evaluated: tuple[int, Mapping[str, float]] = (-1, {})
        lora = config.stack.lora is not None
        self._format = Format(
            adapter_only=config.save_mode == "adapter" or (config.save_mode == "auto" and lora),
            sharded=config.save_format == "sharded",
        )

    def restore(self) -> int:
        """Load the checkpoint to resume from; returns the rollout id to go on with."""
        source = self._source
        if source is None:
            if self._starting_weights is not None:
                self._weights.load_weights(self._starting_weights())
            return 0
        state = self._ranks.together(lambda: read_trainer_state(source))
        self._load(source, state)
        self._tell_changes(state)
        self.evaluation_changes = evaluation_changes(state, self._config, self._identity)
        if state.progress:
            self.progress.resume(state.progress)
        else:
            logger.warning("the checkpoint knows no costs: progress/* counts from this resume on")
        logger.info("resumed from %s at rollout %d", source, state.rollouts_done)
        return state.rollouts_done

    def _load(self, source: Path, state: TrainerState) -> None:
        """Raises ConfigError where they do not fit and settings of the weights differ."""
        try:
            restore(source, self._weights, self._ranks)
        except CheckpointError as error:
            changed = changes(state.config, self._config.model_dump(mode="json")).others
            shaping = [line for line in changed if line.startswith(("stack.lora", "model."))]
            if not shaping:
                raise
            raise ConfigError(
                f"load_dir: {source} has weights of other settings: {'; '.join(shaping)}. Set them "
                f"back, or leave load_dir out and set run_name for a new run.\nIn full: {error}"
            ) from error

    def _tell_changes(self, state: TrainerState) -> None:
        config = self._config
        changed = changes(state.config, config.model_dump(mode="json"))
        for line in changed.others:
            logger.warning("resuming with another setting than the run was saved with: %s", line)
        for line in differences(state.identity, self._identity):
            logger.warning("resuming with something else than the run was saved with: %s", line)
        if changed.safe:
            logger.info("changed since, without making it another run: %s", "; ".join(changed.safe))
        between = state.rollouts_done % config.weight_sync_interval
        if between and not config.save_is_due(state.rollouts_done):
            logger.warning(
                "the run was stopped between two weight syncs: the next %d rollouts are sampled "
                "with newer weights than the run that is never stopped would have used",
                config.weight_sync_interval - between,
            )

    @property
    def read_the_device(self) -> bool:
        """Whether a save needs the train stack on the device, as it does unless save_reads=host."""
        return self._config.save_reads == "device"

    def is_due(self, rollouts_done: int) -> bool:
        return self._config.save_is_due(rollouts_done)

    def evaluated(self, rollouts_done: int, metrics: Mapping[str, float]) -> None:
        """Note how the present weights did on held-out prompts.

        Raises ConfigError when the run's first evaluation has no metric that keep_best names.
        """
        name, is_first = self._config.keep_best, self._evaluated[0] < 0
        if is_first and self._config.save_interval and name is not None and name not in metrics:
            raise ConfigError(
                f"keep_best={name}: this run's evaluations give {', '.join(sorted(metrics))}. "
                "Set keep_best to one of them, or to null."
            )
        self._evaluated = (rollouts_done, metrics)

    def save(self, rollouts_done: int) -> Path:
        """Write checkpoint-<rollouts_done>; see `read_the_device` for where the weights must be.

        All ranks together: rank 0 makes the folder and gives it its final name, once every rank
        has written its part. Raises CheckpointError on all ranks when one cannot write.
        """
        step, metrics = self._evaluated
        state = TrainerState(
            rollouts_done=rollouts_done,
            optimizer_step=self._weights.weight_version,
            wandb_run_id=self.wandb_run_id,
            config=self._config.model_dump(mode="json"),
            progress=self.progress.state(),
            identity=self._identity,
            evaluation=_finite(metrics) if step == rollouts_done else {},
        )

        def write(folder: Path) -> None:
            write_state(folder, self._weights, state, self._format, self._ranks)

        if self._ranks.is_main:
            _force_to_disk(self._records())
        path = save_together(self._store, rollouts_done, write, self._ranks)
        logger.info("saved %s", path)
        if self._ranks.is_main:
            keep_the_best(self._store, self._config, self._identity)
        return path


def keep_the_best(store: CheckpointStore, config: RunConfig, present: Mapping[str, str]) -> None:
    """Point `best` at the best checkpoint, and delete what save_keep does not keep.

    A disk that refuses is a warning: everything that matters has been written.
    """
    best = None if config.keep_best is None else best_step(store, config, present)
    try:
        store.mark_best(best)
    except OSError as error:
        logger.warning("the link to the best checkpoint, %s, cannot be made: %s", best, error)
    if config.save_keep is None:
        return
    try:
        for step in store.retain(config.save_keep, besides=best):
            logger.info("deleted checkpoint-%d: save_keep=%d", step, config.save_keep)
    except OSError as error:
        logger.warning("an old checkpoint cannot be deleted: %s", error)


def best_step(store: CheckpointStore, config: RunConfig, present: Mapping[str, str]) -> int | None:
    """The step whose weights had the highest keep_best, the latest of equals; None where no
    checkpoint was evaluated as this run, of the identity `present`, does it."""
    states = {step: read_trainer_state(store.folder(step)) for step in store.steps()}
    name = config.keep_best or ""
    known = [(s.evaluation[name], step) for step, s in states.items() if name in s.evaluation]
    best_first = (step for _, step in sorted(known, reverse=True))
    alike = (step for step in best_first if not evaluation_changes(states[step], config, present))
    return next(alike, None)


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _force_to_disk(files: Sequence[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
