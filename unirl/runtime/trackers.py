"""The sinks of a run: its record and the console, and the trackers that the configuration asks for,
each in a thread of its own."""

from __future__ import annotations

from pathlib import Path

from unirl.config.schema import RunConfig
from unirl.runtime.run_directory import RunDirectory
from unirl.tracking.background import BackgroundSink
from unirl.tracking.console import ConsoleSink, RunConsole
from unirl.tracking.jsonl import JsonlSink
from unirl.tracking.running import Running
from unirl.tracking.tensorboard_sink import TensorBoardSink
from unirl.tracking.time_left import TimeLeft
from unirl.tracking.tracker import Sink
from unirl.tracking.trackio_sink import TrackioSink
from unirl.tracking.wandb_sink import WandbSink
from unirl.trainer.checkpoints import Checkpoints
from unirl.trainer.requests import evaluation_params


def build_sinks(
    config: RunConfig,
    directory: RunDirectory,
    console: RunConsole,
    checkpoints: Checkpoints,
    running: Running,
    saved_wandb_run_id: str | None,
    start: int,
    optimizer_step: int,
) -> list[Sink]:
    """For a run that goes on after `start` rollouts and `optimizer_step` steps.

    Later checkpoints keep the id of the wandb run. Raises UnirlError when a tracker cannot start.
    """
    asked, path = config.logging, directory.path
    trackers: dict[str, Sink] = {}
    if asked.report_to_tensorboard:
        trackers["tensorboard"] = TensorBoardSink(path / "tensorboard", start, optimizer_step)
    if asked.report_to_trackio:
        values = config.model_dump(mode="json")
        trackers["trackio"] = TrackioSink(
            asked.project_name, config.run_name, path, values, resumes=start > 0
        )
    if asked.report_to_wandb:
        wandb = _wandb_sink(config, path, saved_wandb_run_id)
        checkpoints.wandb_run_id = wandb.run_id
        trackers["wandb"] = wandb
    record = JsonlSink(directory.metrics_file)
    background = [BackgroundSink(name, sink) for name, sink in trackers.items()]
    return [record, _console_sink(config, console, start, running), *background]


def _console_sink(
    config: RunConfig, console: RunConsole, start: int, running: Running
) -> ConsoleSink:
    return ConsoleSink(
        console,
        config.num_rollouts,
        start,
        evaluation_params(config),
        config.eval_samples_per_prompt,
        TimeLeft(config.num_rollouts, start, config.evaluation_is_due, config.save_is_due),
        running,
    )


def _wandb_sink(config: RunConfig, directory: Path, run_id: str | None) -> WandbSink:
    return WandbSink(
        config.logging.project_name,
        config.logging.entity,
        config.run_name,
        config.logging.tags,
        directory,
        config.model_dump(mode="json"),
        run_id,
    )
