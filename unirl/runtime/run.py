"""Run a validated configuration in this process, from an empty directory to the last picture.

On several devices this process is one rank of the run, and all of them run this text. Rank 0 alone
has console, files and trackers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from unirl.checkpoint.changes import flatten
from unirl.checkpoint.identity import identity
from unirl.checkpoint.source import Source
from unirl.checkpoint.state import read_trainer_state
from unirl.config.schema import AUTO, RunConfig
from unirl.core.errors import ConfigError
from unirl.distributed.agreement import require_same_settings, require_visible
from unirl.distributed.group import joined, take_device
from unirl.distributed.ranks import Ranks
from unirl.distributed.watch import watching
from unirl.residency.perfetto import TraceFile
from unirl.residency.trace import TransitionLog
from unirl.runtime.build import (
    Roles,
    build_host,
    build_reward_role,
    build_roles,
    load_all_prompts,
    missing_judges,
)
from unirl.runtime.doctor import examined_first
from unirl.runtime.finish import finish, finish_complete, note_failure
from unirl.runtime.interrupt import CONDITION_MET, GracefulStop
from unirl.runtime.loop import build_trainer, keep_rule, overlap_bytes, planned_problem
from unirl.runtime.run_directory import RunDirectory
from unirl.runtime.starting_weights import starting_weights
from unirl.runtime.trackers import build_sinks
from unirl.tracking.console import RunConsole, setup_logging, setup_rank_logging
from unirl.tracking.running import Running
from unirl.tracking.sessions import SessionLog
from unirl.tracking.tracker import Sink, Tracker
from unirl.trainer.archive import EvaluationArchive
from unirl.trainer.checkpoints import Checkpoints
from unirl.trainer.diffusion import TrainResult

logger = logging.getLogger("unirl.runtime")


def run(config: RunConfig) -> int:
    """Train on one device; returns the process's exit code."""
    return run_as_rank(lambda ranks: config)


def run_as_rank(read_config: Callable[[Ranks], RunConfig]) -> int:
    """Train as the rank that the launcher made of this process; returns its exit code.

    The configuration is read once the ranks have met: what is wrong on one rank ends all.
    """
    with ExitStack() as resources:
        ranks = resources.enter_context(joined())
        stop = resources.enter_context(GracefulStop())
        resources.enter_context(watching(ranks))
        config = ranks.together(lambda: read_config(ranks))
        if ranks.world_size > 1:
            require_same_settings(ranks.together(lambda: _common_settings(config)), ranks)
        ranks.together(lambda: take_device(config.num_devices, config.device, ranks))
        if config.num_threads > 0:
            torch.set_num_threads(config.num_threads)
        stop.limit(config.max_hours)
        result = _run(config, stop, resources, ranks)
    if result.ended_by is not None:
        return CONDITION_MET
    return stop.exit_code if result.interrupted else 0


def _run(config: RunConfig, stop: GracefulStop, resources: ExitStack, ranks: Ranks) -> TrainResult:
    console = RunConsole(config.logging.console)
    directory = RunDirectory(config)
    source = ranks.on_main(lambda: _claim(directory, resources))
    _require_visible_folders(config, directory, source.folder, ranks)
    if ranks.is_main:
        setup_logging(directory.path, console)
    else:
        setup_rank_logging(directory.path, ranks.rank)
    for reason in source.skipped:
        logger.warning("load_dir=auto passes over a checkpoint: %s", reason)
    done = _rollouts_done(source)
    if ranks.on_main(lambda: directory.is_complete(done)):
        _require_auto(config, done)
        return ranks.on_main(lambda: finish_complete(config, directory, done, stop, console))
    sessions = SessionLog(directory.path)
    try:
        result = _train(config, directory, source.folder, console, stop, resources, ranks, sessions)
    except BaseException as error:
        if ranks.is_main:
            note_failure(sessions, error)
        raise
    ranks.on_main(lambda: finish(directory, result, stop, sessions, console))
    return result


def _claim(directory: RunDirectory, resources: ExitStack) -> Source:
    """Take the run directory for this run; the checkpoint to resume from."""
    resources.enter_context(directory)
    return directory.source()


def _rollouts_done(source: Source) -> int:
    return 0 if source.folder is None else read_trainer_state(source.folder).rollouts_done


def _require_auto(config: RunConfig, rollouts_done: int) -> None:
    """A job that is started again and again finds its work done; a person meant something else."""
    if config.load_dir != AUTO:
        raise ConfigError(
            f"load_dir={config.load_dir}: {rollouts_done} rollouts are done and num_rollouts="
            f"{config.num_rollouts} is the total. Raise num_rollouts to go on."
        )


def _common_settings(config: RunConfig) -> Mapping[str, object]:
    """What must not differ between ranks: a rank that decides otherwise would wait for ever."""
    return {**flatten(config.model_dump(mode="json")), **identity(config)}


def _require_visible_folders(
    config: RunConfig, directory: RunDirectory, source: Path | None, ranks: Ranks
) -> None:
    if source is not None:
        require_visible(
            source, "but each rank reads it. Set load_dir to a folder that all of them see.", ranks
        )
    if config.save_interval > 0 and config.save_format == "sharded":
        require_visible(
            directory.checkpoint_dir,
            "but save_format=sharded lets each rank write into it. Set save_dir to a folder that "
            "all of them see, or save_format=gathered.",
            ranks,
        )


def _train(
    config: RunConfig,
    directory: RunDirectory,
    source: Path | None,
    console: RunConsole,
    stop: GracefulStop,
    resources: ExitStack,
    ranks: Ranks,
    sessions: SessionLog,
) -> TrainResult:
    """Everything that can be refused is loaded before the first row is written."""
    prompts = ranks.together(lambda: load_all_prompts(config))
    host = build_host(config)
    reward = build_reward_role(config, prompts, host)
    problem = planned_problem(config, reward, ranks)
    roles = build_roles(config, prompts, reward, host, ranks)
    _announce(config, roles, directory)
    saved_run_id = read_trainer_state(source).wandb_run_id if source else None
    checkpoints = Checkpoints(
        config,
        roles.stack.weights,
        directory.checkpoint_dir,
        source,
        ranks,
        starting_weights=starting_weights(config, ranks),
        records=directory.records,
    )
    start = checkpoints.restore()
    ranks.on_main(lambda: directory.begin(start, checkpoints.evaluation_changes))
    ranks.on_main(lambda: sessions.begin(start))
    transitions = _transition_log(directory, ranks)
    resources.callback(transitions.close)
    sinks: list[Sink] = []
    running = Running()
    if ranks.is_main:
        sinks = build_sinks(
            config,
            directory,
            console,
            checkpoints,
            running,
            saved_run_id,
            start,
            roles.stack.weight_version,
        )
    # Closed before the summary, which is the last thing that is said.
    with Tracker(sinks) as tracker:
        trainer = build_trainer(
            config,
            prompts,
            roles,
            keep_rule(config, problem, start, prompts.suite_sizes),
            checkpoints,
            EvaluationArchive(directory.path, config),
            transitions,
            tracker,
            lambda: ranks.any(stop.requested()),
            ranks,
            checkpoints.progress,
            lambda clock: examined_first(config, roles, directory.path, ranks, clock),
            overlap_bytes=overlap_bytes(config, problem),
            running=running,
        )
        return trainer.train(start)


def _transition_log(directory: RunDirectory, ranks: Ranks) -> TransitionLog:
    """Rank 0's moves; the others make the same."""
    nowhere = Path(os.devnull)
    moves = directory.transitions_file if ranks.is_main else nowhere
    return TransitionLog(moves, TraceFile(directory.trace_file if ranks.is_main else nowhere, 0))


def _announce(config: RunConfig, roles: Roles, directory: RunDirectory) -> None:
    total = sum(parameter.numel() for parameter in roles.stack.model.network.parameters())
    logger.info(
        "%s: training %.3g of %.3g M parameters of %s, results in %s",
        config.run_name,
        roles.stack.num_trained / 1e6,
        total / 1e6,
        config.model.path,
        directory.path,
    )
    for name, packages in missing_judges(config.eval_rewards).items():
        logger.info("eval_rewards.%s is left out: install %s", name, ", ".join(packages))
