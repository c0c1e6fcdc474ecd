"""The loop around loaded roles: who is on the device when, and what is written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unirl.algorithms.making import make_algorithm
from unirl.config.schema import RunConfig
from unirl.core.errors import ConfigError
from unirl.data.stream import PromptStream
from unirl.distributed.agreement import require_same_settings
from unirl.distributed.ranks import Ranks
from unirl.memory.meter import CudaMeter
from unirl.models.forward_count import ForwardCount
from unirl.planning.hardware import GIB, reserve
from unirl.residency.auto import AutoRule
from unirl.residency.planner import ResidencyPlanner
from unirl.residency.policy import KeepRule, ResidencyPolicy, Role
from unirl.residency.problem import ResidencyProblem
from unirl.residency.timeline import plain_window, timeline
from unirl.reward.service import RewardService
from unirl.runtime.build import Prompts, Roles, pick_device
from unirl.tracking.running import Running
from unirl.tracking.tracker import Tracker
from unirl.trainer.archive import EvaluationArchive
from unirl.trainer.clock import MemoryMeter, NoMeter, PhaseClock
from unirl.trainer.diffusion import DiffusionTrainer
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.phases import Phases
from unirl.trainer.progress import Progress
from unirl.trainer.requests import RequestFactory
from unirl.trainer.roles import MoveRecord, SaveRole, TrainRole


def build_trainer(
    config: RunConfig,
    prompts: Prompts,
    roles: Roles,
    rule: KeepRule,
    checkpoints: SaveRole,
    archive: EvaluationArchive,
    moves: MoveRecord,
    tracker: Tracker,
    should_stop: Callable[[], bool],
    ranks: Ranks,
    progress: Progress,
    train: Callable[[PhaseClock], TrainRole] | None = None,
    overlap_bytes: int | None = None,
    running: Running | None = None,
) -> DiffusionTrainer:
    """Wire the loop around loaded roles; what `train` gives stands before the stack."""
    meter = _meter(config)
    planner = build_planner(config, roles, rule, moves, meter, ranks, overlap_bytes)
    require_same_settings({"residency plan": planner.plan}, ranks)
    forwards = ForwardCount([roles.stack.model.network, *roles.engine.networks])
    clock = PhaseClock(meter, moves.phase_ended, forwards.totals, running)
    phases = Phases(roles.engine, roles.reward, roles.sync, planner, clock, ranks)
    requests = RequestFactory(config, roles.stack.model, make_algorithm(config.algorithm))
    return DiffusionTrainer(
        config,
        roles.stack if train is None else train(clock),
        phases,
        PromptStream(prompts.train, config.batch_size, config.seed),
        requests,
        Evaluator(config, phases, requests, prompts.suites, archive, should_stop),
        checkpoints,
        tracker,
        moves,
        should_stop,
        progress,
    )


def build_planner(
    config: RunConfig,
    roles: Roles,
    rule: KeepRule,
    moves: MoveRecord,
    meter: MemoryMeter,
    ranks: Ranks,
    overlap_bytes: int | None,
) -> ResidencyPlanner:
    """Tracks the roles that share the slab: train unless it samples by itself, rollout, reward."""
    components = {Role.ROLLOUT: roles.engine.parts, Role.REWARD: roles.reward.parts}
    if not roles.engine.capabilities.shares_train_weights:
        components[Role.TRAIN] = roles.stack.parts
    budget = config.device_budget_gib
    return ResidencyPlanner(
        rule,
        components,
        moves.record,
        ranks.barrier,
        bystanders=roles.stack.parts,
        budget_bytes=None if budget is None else int(budget * GIB),
        overlap_bytes=overlap_bytes,
        allocated_bytes=meter.allocated_bytes,
    )


def planned_problem(
    config: RunConfig, reward: RewardService, ranks: Ranks
) -> ResidencyProblem | None:
    """What fits and what moves cost, before any weights load; None where nobody asked.

    Asked for by residency=auto, overlap_moves and device_budget_gib. Raises ConfigError when a
    phase does not fit. All ranks take rank 0's answer for the smallest device.
    """
    needs_budget = config.residency == "auto" or config.overlap_moves
    if not needs_budget and config.device_budget_gib is None:
        return None
    from unirl.planning.apart import search_problem_apart
    from unirl.planning.plan import search_problem

    search = search_problem_apart if ranks.world_size > 1 else search_problem
    budget = min(ranks.gather(_budget_bytes(config)))
    return ranks.on_main(lambda: search(config, reward.components, budget))


def keep_rule(
    config: RunConfig, problem: ResidencyProblem | None, start: int, suite_sizes: Sequence[int]
) -> KeepRule:
    """What decides about idle weights in a run that goes on at rollout `start`."""
    if problem is None or config.residency == "policy":
        return ResidencyPolicy.of(config)
    phases = timeline(config, start, suite_sizes)
    return AutoRule(problem, plain_window(config), phases)


def overlap_bytes(config: RunConfig, problem: ResidencyProblem | None) -> int | None:
    """What components may take while some leave and others come; None: released first."""
    return problem.overlap_bytes if problem is not None and config.overlap_moves else None


def _budget_bytes(config: RunConfig) -> int:
    if config.device_budget_gib is not None:
        return int(config.device_budget_gib * GIB)
    device = pick_device(config.device)
    if device.type != "cuda":
        key = "residency" if config.residency == "auto" else "overlap_moves"
        asked, instead = ("auto", "policy") if key == "residency" else ("true", "false")
        raise ConfigError(
            f"{key}={asked} needs to know what may be used of device {device.type}, which has no "
            f"memory of its own. Set device_budget_gib, or {key}={instead}."
        )
    memory_bytes = torch.cuda.get_device_properties(device).total_memory
    return memory_bytes - reserve(memory_bytes)


def _meter(config: RunConfig) -> MemoryMeter:
    device = pick_device(config.device)
    return CudaMeter(device) if device.type == "cuda" else NoMeter()
