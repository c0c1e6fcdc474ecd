"""Rows and pictures to Weights & Biases, on by `logging.report_to_wandb`. wandb is imported on use.

Each family of metrics has its own x-axis, so that train curves count optimizer steps and the others
count rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.core.errors import UnirlError
from unirl.tracking.tracker import Panel, Row, Sink

_AXES = {
    "train": "train/step",
    "rollout": "rollout/step",
    "perf": "rollout/step",
    "memory": "rollout/step",
    "residency": "rollout/step",
    "eval": "eval/step",
}


class WandbSink(Sink):
    """One wandb run; a resumed run passes the stored `run_id` and its curves go on.

    Raises:
        UnirlError: wandb is missing or refuses to start.
    """

    def __init__(
        self,
        project: str,
        entity: str | None,
        run_name: str,
        tags: Sequence[str],
        directory: Path,
        config: Mapping[str, Any],
        run_id: str | None,
    ) -> None:
        try:
            import wandb

            self._wandb = wandb
            self._run = wandb.init(
                project=project,
                entity=entity,
                name=run_name,
                tags=list(tags),
                dir=str(directory),
                config=dict(config),
                id=run_id,
                resume="allow",
                # The console is kept in run.log; wandb's capture of it would tear the progress bar.
                settings=wandb.Settings(console="off"),
            )
        except Exception as error:
            raise UnirlError(
                f"logging.report_to_wandb=true, but wandb did not start: {error}\n"
                "Log in with `wandb login`, work offline with WANDB_MODE=offline, or set "
                "logging.report_to_wandb=false."
            ) from error
        for axis in dict.fromkeys(_AXES.values()):
            self._run.define_metric(axis, hidden=True)
        for family, axis in _AXES.items():
            self._run.define_metric(f"{family}/*", step_metric=axis)

    @property
    def run_id(self) -> str:
        """What a later run passes to continue this one."""
        return self._run.id

    def log(self, row: Row) -> None:
        self._run.log({**row.metrics, **row.axes()})

    def show(self, panel: Panel) -> None:
        images = [self._wandb.Image(str(p.path), caption=p.caption) for p in panel.pictures]
        self._run.log({panel.name: images, "eval/step": float(panel.rollouts_done)})

    def close(self) -> None:
        self._run.finish()
