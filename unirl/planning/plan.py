"""The plan of a recipe: what a run would move, hold and cost, before anything loads.

    plan = make_plan(config, make_target(config, "h100-80g"), ((), ()), horizon(config))
    plan.fits, [peak.total_bytes for peak in plan.peaks]

The moves are those of the real loop over roles that take notes (`planning.simulate`), sizes come
from the model's configuration (`planning.blueprint`), workspace from the real network on tensors
without memory (`planning.workspace`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from unirl.config.components import engine_capabilities
from unirl.config.residency_checks import in_shards
from unirl.config.resources import resolve_path
from unirl.config.schema import RunConfig
from unirl.config.suites import AskedSuite, asked_suites
from unirl.core.components import Component, Movable, Parking
from unirl.data.prompts import load_prompts
from unirl.planning.blueprint import Blueprint, blueprint_model
from unirl.planning.hardware import Target
from unirl.planning.simulate import Counts, Networks, Notes, simulate
from unirl.planning.workspace import Workspace, estimate_workspace
from unirl.residency.auto import Assignment, AutoRule, assign_window
from unirl.residency.gaps import Part
from unirl.residency.plan import (
    Line,
    Peak,
    Traffic,
    peaks,
    seconds_of,
    steady_window,
    traffic,
)
from unirl.residency.policy import KeepRule, ResidencyPolicy, Role
from unirl.residency.problem import ResidencyProblem
from unirl.residency.timeline import PhaseKind, phase_kinds, plain_window, timeline

UNLIMITED = 2**62
WRITTEN_IN = {
    "nobody": frozenset[PhaseKind](),
    "optimizer step": frozenset({PhaseKind.TRAIN}),
    "push": frozenset({PhaseKind.ROLLOUT, PhaseKind.EVALUATE_ROLLOUT}),
    "forward": frozenset(PhaseKind),
}
"""Phases that write a component, by who writes it."""


@dataclass(frozen=True)
class Plan:
    """What a run of `config` would do on `target`."""

    config: RunConfig
    target: Target
    source: str
    """Where the model's sizes come from."""
    notes: Notes
    workspace: Workspace
    needed: Mapping[PhaseKind, int]
    """Bytes beside the components in each kind of phase."""
    peaks: list[Peak]
    problem: ResidencyProblem
    """What the search for the cheapest moves starts from, with the residency keys as they act."""
    remarks: tuple[str, ...]
    """What the numbers leave out."""

    @property
    def window(self) -> list[Line]:
        """Moves of one optimizer window in the middle of the run."""
        return steady_window(self.notes.phases, self.notes.lines)

    @property
    def window_traffic(self) -> Traffic:
        return traffic(self.window)

    @property
    def window_seconds(self) -> float:
        return seconds_of(self.window, self.target.onload_rate, self.target.offload_rate)

    @property
    def host_bytes(self) -> int:
        return sum(self.notes.host_bytes.values())

    @property
    def too_big(self) -> Peak | None:
        """The fullest phase that does not fit."""
        budget = self.target.budget_bytes
        over = [peak for peak in self.peaks if budget is not None and peak.total_bytes > budget]
        return max(over, key=lambda peak: peak.total_bytes, default=None)

    @property
    def host_is_too_small(self) -> bool:
        limit = self.target.host_bytes
        return limit is not None and self.host_bytes > limit

    @property
    def fits(self) -> bool:
        return self.too_big is None and not self.host_is_too_small


def make_plan(
    config: RunConfig,
    target: Target,
    reward: tuple[Sequence[Component], Sequence[str]],
    num_rollouts: int,
    estimate: Callable[[RunConfig, Blueprint], Workspace] = estimate_workspace,
) -> Plan:
    """Plan the first `num_rollouts` rollouts.

    `reward`: the scorers' components, and remarks on those whose size is not known.
    Raises ConfigError when sizes are not known.
    """
    config = config.model_copy(update={"num_rollouts": num_rollouts})
    shares = engine_capabilities(config).shares_train_weights
    sampled = blueprint_model(config, with_encoders=True)
    workspace = estimate(config, sampled)
    counts = _counts(config)
    needed = workspace_by_kind(config, workspace, _gathered_bytes(config))

    def run(rule: KeepRule) -> Notes:
        # Shards replace a network's weights, so each simulation takes a trained one of its own.
        trained = blueprint_model(config, with_encoders=shares)
        engine = trained.model if shares else sampled.model
        networks = Networks(trained.model, engine, trained.block_classes)
        overlap_bytes = _overlap_bytes(config, needed, target.budget_bytes)
        return simulate(config, networks, reward[0], rule, counts, overlap_bytes)

    notes = run(ResidencyPolicy.of(config))
    problem = residency_problem(config, notes, needed, target.budget_bytes)
    if config.residency == "auto":
        notes = run(_searched_rule(config, problem, counts))
    return Plan(
        config=config,
        target=target,
        source=sampled.source,
        notes=notes,
        workspace=workspace,
        needed=needed,
        peaks=peaks(notes.phases, needed),
        problem=problem,
        remarks=(*reward[1], *_remarks(config, target.budget_bytes)),
    )


def _searched_rule(config: RunConfig, problem: ResidencyProblem, counts: Counts) -> KeepRule:
    """What a run would follow; where it would be refused, everything parked that may be."""
    if not problem.fits:
        pinned = problem.explicit
        return ResidencyPolicy(*(pinned[role] is True for role in Role))
    return AutoRule(problem, plain_window(config), timeline(config, 0, counts.suites))


def search_problem(
    config: RunConfig, reward: Sequence[Component], budget_bytes: int
) -> ResidencyProblem:
    """What residency=auto searches in, for a run of `config`.

    Raises ConfigError when a phase does not fit, whatever is parked.
    """
    target = Target("this device", budget_bytes, 0, None, 1.0, 1.0)
    by_policy = config.model_copy(update={"residency": "policy"})  # sizes do not depend on it
    sizes = make_plan(by_policy, target, (reward, ()), horizon(config)).problem
    problem = replace(sizes, explicit=_asked(config))
    problem.require_fit()
    return problem


def workspace_by_kind(
    config: RunConfig, workspace: Workspace, gathered_bytes: int
) -> Mapping[PhaseKind, int]:
    """Bytes beside the components in each kind of phase.

    What is recorded of a window's rollouts stays on the device until the step that uses it.
    `gathered_bytes`: most that is gathered at a time of weights in shards.
    """
    on_demand = not config.optimizer_resident
    kept = workspace.rollout_kept * config.accumulate_rollouts
    sampling = max(workspace.encode, workspace.rollout, workspace.decode)
    if engine_capabilities(config).shares_train_weights:
        sampling += gathered_bytes
    backward = workspace.grads + workspace.train + gathered_bytes
    step = workspace.grads + workspace.optimizer_step
    return {
        PhaseKind.ROLLOUT: sampling + kept,
        PhaseKind.REWARD: kept,
        PhaseKind.TRAIN: max(backward, 0 if on_demand else step) + workspace.rows + kept,
        PhaseKind.STEP: step + workspace.rows + kept,
        PhaseKind.EVALUATE_ROLLOUT: sampling + workspace.rollout_kept,
        PhaseKind.EVALUATE_REWARD: workspace.rollout_kept,
        PhaseKind.SAVE: 0,
    }


def _gathered_bytes(config: RunConfig) -> int:
    """Most that is whole at a time of a network in shards; 0 without shards."""
    if not in_shards(config):
        return 0
    from unirl.planning.layout import lay_out, pretended_group

    blueprint = blueprint_model(config, with_encoders=False)
    with pretended_group(0, config.num_devices):
        network = blueprint.model.network
        layout = lay_out(network, blueprint.block_classes, config.backend, config.num_devices)
    if config.rollout.unshard:
        return layout.gather_bytes
    return layout.largest_gathered_bytes(config.backend.prefetch)


def residency_problem(
    config: RunConfig,
    notes: Notes,
    workspace: Mapping[PhaseKind, int],
    budget_bytes: int | None,
) -> ResidencyProblem:
    """The search's input; the residency keys are those that act, so with policy none is free."""
    users: dict[str, set[Role]] = {}
    for role, names in notes.roles.items():
        for name in names:
            users.setdefault(name, set()).add(role)
    parts = [
        _part(notes.parts[name], frozenset(roles))
        for name, roles in users.items()
        if notes.parts[name].parking is not Parking.KEEP and not notes.parts[name].on_demand
    ]
    searched = {part.name for part in parts}
    others = [part for name, part in notes.parts.items() if name not in searched]
    resting = sum(part.num_bytes() for part in others if not part.on_demand)
    on_loan = sum(part.num_bytes() for part in others if part.on_demand)
    step = workspace[PhaseKind.STEP] + on_loan
    needed = {
        **workspace,
        PhaseKind.TRAIN: max(workspace[PhaseKind.TRAIN], step if on_loan else 0),
        PhaseKind.SAVE: workspace[PhaseKind.SAVE] + on_loan,
    }
    return ResidencyProblem(
        parts=tuple(parts),
        workspace={kind: needed[kind] + resting for kind in phase_kinds(config)},
        budget_bytes=UNLIMITED if budget_bytes is None else budget_bytes,
        explicit=_asked(config),
        kept_bytes=workspace[PhaseKind.REWARD],
    )


def _overlap_bytes(
    config: RunConfig, needed: Mapping[PhaseKind, int], budget_bytes: int | None
) -> int | None:
    """As `ResidencyProblem.overlap_bytes` says; None: what leaves is released first."""
    if not config.overlap_moves:
        return None
    # What is recorded of a window's rollouts is all that the reward phase needs beside its parts.
    return (UNLIMITED if budget_bytes is None else budget_bytes) - needed[PhaseKind.REWARD]


def _part(part: Movable, roles: frozenset[Role]) -> Part:
    num_bytes = part.num_bytes()
    return Part(
        name=part.name,
        roles=roles,
        num_bytes=num_bytes,
        bring_in_bytes=0 if part.parking is Parking.DROP else num_bytes,
        written_in=WRITTEN_IN.get(part.written_by, frozenset(PhaseKind)),
        copies_out=part.parking is Parking.COPY,
        once_per_step=part.written_by == "push",
    )


def _asked(config: RunConfig) -> dict[Role, bool | None]:
    """The residency keys: as they act under residency=policy, as they were set under auto."""
    if config.residency == "policy":
        return {Role(name): stays for name, stays in config.resident.items()}
    return _set_by_the_user(config)


def _set_by_the_user(config: RunConfig) -> dict[Role, bool | None]:
    train = config.train_resident
    # A sync in one step reads the trainer while it loads the engine.
    if config.stack.lora is None:
        train = True
    return {
        Role.TRAIN: train,
        Role.ROLLOUT: config.rollout_resident,
        Role.REWARD: config.reward_resident,
    }


def free_problem(plan: Plan) -> ResidencyProblem:
    """The plan's problem as residency=auto would search in it with the three keys null."""
    nothing_set = {"train_resident": None, "rollout_resident": None, "reward_resident": None}
    return replace(
        plan.problem, explicit=_set_by_the_user(plan.config.model_copy(update=nothing_set))
    )


def automatic(plan: Plan) -> Assignment:
    """What residency=auto would then do in a plain window.

    Raises ConfigError when some phase does not fit, whatever is parked.
    """
    return assign_window(free_problem(plan), plain_window(plan.config))


def horizon(config: RunConfig) -> int:
    """Rollouts after which all kinds of windows have been seen, or the whole run if it is
    shorter."""
    window = config.accumulate_rollouts
    periods = (config.eval_interval, config.save_interval, config.weight_sync_interval)
    seen = max(4 * window, max(periods) + 2 * window)
    return min(config.num_rollouts, math.ceil(seen / window) * window)


def _counts(config: RunConfig) -> Counts:
    """From the prompt files, or as many as are asked for where these are not on this machine."""
    train = _num_records(config.data.train) or config.batch_size
    return Counts(
        max(train, config.batch_size), tuple(_suite_size(s, config) for s in asked_suites(config))
    )


def _suite_size(suite: AskedSuite, config: RunConfig) -> int:
    available = _num_records(suite.path)
    if available is None:
        return suite.num_prompts or config.eval_chunk_prompts
    return min(available, suite.num_prompts or available)


def _num_records(path: str) -> int | None:
    file = resolve_path(path)
    return len(load_prompts(file, "data")) if file.is_file() else None


def _remarks(config: RunConfig, budget_bytes: int | None) -> list[str]:
    remarks = ["scorers' activations, the CUDA context"]
    if config.residency == "auto" and budget_bytes is None:
        remarks.append("a budget, so auto keeps everything; give --gpu, --budget-gib or its key")
    if config.overlap_moves and budget_bytes is None:
        remarks.append("a budget, so moves always overlap; give --gpu, --budget-gib or its key")
    missing = [config.data.train, *(suite.path for suite in asked_suites(config))]
    missing = [path for path in missing if not resolve_path(path).is_file()]
    if missing:
        remarks.append(f"prompts of {', '.join(missing)}, absent here; enough are assumed")
    return remarks
