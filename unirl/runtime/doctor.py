"""The doctor: a look at a run's first window before it is trained on, or instead of a run.

What is looked at: `train.examination`; what it means: `train.findings`.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from unirl.algorithms.making import make_algorithm
from unirl.checkpoint.source import find_source
from unirl.config.schema import RunConfig
from unirl.core.errors import ConfigError
from unirl.core.types import ScoredRollout
from unirl.distributed.group import take_device
from unirl.distributed.ranks import OneRank, Ranks
from unirl.residency.perfetto import TraceFile
from unirl.residency.trace import TransitionLog
from unirl.runtime.build import (
    Prompts,
    Roles,
    build_host,
    build_reward_role,
    build_roles,
    load_all_prompts,
)
from unirl.runtime.loop import build_trainer, keep_rule, planned_problem
from unirl.runtime.starting_weights import starting_weights
from unirl.tracking.files import replacing
from unirl.tracking.tracker import Tracker
from unirl.train.examination import Level, measure
from unirl.train.findings.case import Finding
from unirl.train.findings.judge import findings
from unirl.trainer.archive import EvaluationArchive
from unirl.trainer.checkpoints import Checkpoints
from unirl.trainer.clock import PhaseClock
from unirl.trainer.examined import ExaminedFirst, OnlyExamined
from unirl.trainer.roles import TrainRole

logger = logging.getLogger("unirl.doctor")


@dataclass(frozen=True)
class Examination:
    """What came out of a look at one window."""

    findings: tuple[Finding, ...]
    levels: tuple[Level, ...]
    seconds: float
    """What the look took."""

    @property
    def is_fine(self) -> bool:
        return all(finding.is_fine for finding in self.findings)


def examine(config: RunConfig, roles: Roles, scored: Sequence[ScoredRollout]) -> Examination:
    """Look at one window of rollouts; the train stack is on the device."""
    began = time.perf_counter()
    algorithm = make_algorithm(config.algorithm, roles.reward.differentiable)
    measured = measure(roles.stack.policy(), algorithm, scored, config.stack.micro_batch_size)
    found = findings(config, algorithm.capabilities, measured)
    return Examination(found, measured.levels, time.perf_counter() - began)


def examined_first(
    config: RunConfig, roles: Roles, directory: Path, ranks: Ranks, clock: PhaseClock
) -> TrainRole:
    """The train role of a run, which writes down what the doctor finds in its first window.

    On several ranks, where forwards are made together, nobody looks.
    """
    if not config.doctor or ranks.world_size > 1:
        return roles.stack
    return ExaminedFirst(
        roles.stack, lambda scored: write_down(examine(config, roles, scored), directory), clock
    )


def write_down(examination: Examination, directory: Path) -> None:
    """doctor.json, lines of run.log, and on the console one line and what is not fine."""
    path = directory / "doctor.json"
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(as_json(examination), indent=1) + "\n", encoding="utf-8")
    for finding in examination.findings:
        if finding.is_fine:
            logger.debug("doctor: %s: %s. %s", finding.name, finding.value, finding.sentence)
        else:
            logger.warning("doctor: %s: %s. %s", finding.name, finding.value, finding.advice)
    fine = sum(finding.is_fine for finding in examination.findings)
    logger.info("doctor: %d of %d fine, see %s", fine, len(examination.findings), path)


def as_json(examination: Examination) -> dict[str, object]:
    return {"is_fine": examination.is_fine, **asdict(examination)}


def examine_recipe(config: RunConfig) -> Examination:
    """Sample and score the first window as a run would do it, and look at it instead of training.

    With load_dir the window that a resumed run would begin with. Leaves no files. Raises
    ConfigError for a recipe of several devices.
    """
    if config.num_devices > 1:
        raise ConfigError(
            f"num_devices={config.num_devices}: the doctor looks at one device's part of a run. "
            "Set num_devices=1, and batch_size to what one of them samples."
        )
    # Neither judges nor checkpoints are needed.
    config = config.model_copy(update={"eval_interval": 0, "save_interval": 0})
    take_device(1, config.device, OneRank())
    if config.num_threads > 0:
        torch.set_num_threads(config.num_threads)
    prompts = load_all_prompts(config)
    host = build_host(config)
    reward = build_reward_role(config, prompts, host)
    roles = build_roles(config, prompts, reward, host, OneRank())
    with ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
        return _first_window(config, prompts, roles, folder, resources)


def _first_window(
    config: RunConfig, prompts: Prompts, roles: Roles, folder: Path, resources: ExitStack
) -> Examination:
    checkpoints = Checkpoints(
        config,
        roles.stack.weights,
        folder / "checkpoints",
        find_source(config).folder,
        OneRank(),
        starting_weights=starting_weights(config, OneRank()),
    )
    start = checkpoints.restore()
    moves = TransitionLog(folder / "transitions.jsonl", TraceFile(folder / "trace.json", rank=0))
    resources.callback(moves.close)
    examined: list[Examination] = []
    # The stack keeps the length of the whole run; only the loop ends after a window.
    one_window = config.model_copy(update={"num_rollouts": start + config.accumulate_rollouts})
    problem = planned_problem(config, roles.reward, OneRank())
    trainer = build_trainer(
        one_window,
        prompts,
        roles,
        keep_rule(one_window, problem, start, prompts.suite_sizes),
        checkpoints,
        EvaluationArchive(folder, config),
        moves,
        Tracker([]),
        lambda: False,
        OneRank(),
        checkpoints.progress,
        lambda clock: OnlyExamined(
            roles.stack, lambda scored: examined.append(examine(config, roles, scored))
        ),
    )
    trainer.train(start)
    return examined[0]
