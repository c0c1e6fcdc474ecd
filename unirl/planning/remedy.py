"""What to change in a recipe whose plan does not fit: the smallest change that does.

In go a plan and a way to plan another recipe; out come overrides. Moving or recomputing more is
tried before smaller batches. Plans whose batches differ cost a new estimate of the workspace, which
takes seconds; so the batch to try is worked out from the plan at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from unirl.config import checks
from unirl.config.schema import RunConfig
from unirl.core.errors import ConfigError
from unirl.planning.blueprint import Blueprint
from unirl.planning.plan import Plan, workspace_by_kind
from unirl.planning.workspace import Workspace, estimate_workspace
from unirl.residency.plan import Peak
from unirl.residency.policy import Role
from unirl.residency.timeline import PhaseKind


class HostMemory(Enum):
    """The memory that parked weights take on the host."""

    HOST = "host memory"


HOST = HostMemory.HOST
Shortage = Role | HostMemory
"""Where a plan needs more than there is: on the device while a role works, or on the host."""
BATCH_OF = {
    PhaseKind.ROLLOUT: "rollout.forward_batch_size",
    PhaseKind.EVALUATE_ROLLOUT: "rollout.forward_batch_size",
    PhaseKind.TRAIN: "stack.micro_batch_size",
}
"""The key of the batch whose activations a phase holds."""


@dataclass(frozen=True)
class Change:
    """Keys that are set together, and where less may be needed with them."""

    values: Mapping[str, Any]
    helps: frozenset[Shortage]

    def __str__(self) -> str:
        words = {k: "null" if v is None else str(v).lower() for k, v in self.values.items()}
        return " ".join(f"{key}={word}" for key, word in words.items())


def smallest_change(plan: Plan, replan: Callable[[RunConfig], Plan]) -> list[Change] | None:
    """Overrides of the plan's recipe with which it fits; None when nothing that is known helps.

    What costs speed least is tried first, alone; then changes are added up until it fits, smaller
    batches last, and those that turn out not to be needed are taken out again.
    """
    plans = _Plans(plan, replan)
    free = list(_free_changes(plan))
    for change in free:
        if _shortages(plan) <= change.helps and plans.fits([change]):
            return [change]
    chosen = _added_up(free, plans)
    batches = _smaller_batches(chosen, plans)
    if batches is None:
        return None
    for change in tuple(chosen):
        rest = [other for other in chosen if other is not change]
        if plans.fits([*rest, *batches]):
            chosen = rest
    return [*chosen, *batches]


class _Plans:
    """Plans of a recipe with changes; each is made once."""

    def __init__(self, plan: Plan, replan: Callable[[RunConfig], Plan]) -> None:
        self._config = plan.config
        self._replan = replan
        self._known: dict[str, Plan | None] = {plan.config.model_dump_json(): plan}

    def of(self, changes: Sequence[Change]) -> Plan | None:
        """The plan with these changes; None when the recipe may not be run so."""
        config = _changed(self._config, changes)
        name = config.model_dump_json()
        if name not in self._known:
            self._known[name] = self._planned(config)
        return self._known[name]

    def fits(self, changes: Sequence[Change]) -> bool:
        changed = self.of(changes)
        return changed is not None and changed.fits

    def _planned(self, config: RunConfig) -> Plan | None:
        known = {problem.key for problem in checks.problems(self._config)}
        if any(problem.key not in known for problem in checks.problems(config)):
            return None
        try:
            return self._replan(config)
        except ConfigError:
            return None


def _changed(config: RunConfig, changes: Sequence[Change]) -> RunConfig:
    tree = config.model_dump()
    for key, value in [item for change in changes for item in change.values.items()]:
        *blocks, last = key.split(".")
        block = tree
        for name in blocks:
            block = block[name]
        block[last] = value
    return RunConfig.model_validate(tree)


def _shortages(plan: Plan) -> set[Shortage]:
    on_device = {peak.kind.role for peak in _too_big(plan)}
    return {*on_device, HOST} if plan.host_is_too_small else {*on_device}


def _too_big(plan: Plan) -> list[Peak]:
    budget = plan.target.budget_bytes
    return [peak for peak in plan.peaks if budget is not None and peak.total_bytes > budget]


# --- changes that train the same way --------------------------------------------------------------


def _free_changes(plan: Plan) -> Iterator[Change]:
    """Those that leave every number of a run as it is."""
    config = plan.config
    staying = _staying(plan)
    yield from _residency_changes(plan, staying)
    if not config.rollout.share_base:
        # It saves a copy on the device only where both its users are there.
        users = {Role.TRAIN, Role.ROLLOUT}
        both = [role for role in Role if users <= {*staying, role}]
        yield Change({"rollout.share_base": True}, frozenset({*both, HOST}))
    if not config.backend.activation_checkpointing:
        yield Change({"backend.activation_checkpointing": True}, frozenset({Role.TRAIN}))
    if config.optimizer_resident:
        yield Change({"optimizer_resident": False}, frozenset({Role.TRAIN}))
    else:  # moments that leave after each step are kept on the host
        yield Change({"optimizer_resident": True}, frozenset({HOST}))
    if config.residency == "policy":
        unset = dict.fromkeys(f"{role.value}_resident" for role in Role)
        crowded = [role for role in Role if staying - {role}]
        yield Change({"residency": "auto", **unset}, frozenset({*crowded, HOST}))


def _residency_changes(plan: Plan, staying: Collection[Role]) -> Iterator[Change]:
    """Roles that stay may leave, for the device; roles that leave may stay, for the host. The
    smallest role first."""
    leave = False if plan.config.residency == "policy" else None
    sizes = _role_bytes(plan)
    for role in sorted(sizes, key=lambda role: sizes[role]):
        key = f"{role.value}_resident"
        if role in staying:
            yield Change({key: leave}, frozenset(Role) - {role})
        elif sizes[role]:
            yield Change({key: True}, frozenset({HOST}))


def _staying(plan: Plan) -> set[Role]:
    """Roles that hold something and keep it on the device while they are idle."""
    pinned = plan.problem.explicit
    return {role for role, size in _role_bytes(plan).items() if size and pinned[role]}


def _role_bytes(plan: Plan) -> dict[Role, int]:
    parts = plan.notes.parts
    roles = plan.notes.roles.items()
    return {role: sum(parts[name].num_bytes() for name in names) for role, names in roles}


def _added_up(free: Sequence[Change], plans: _Plans) -> list[Change]:
    """Changes, one after the other, that help where it is too big and nowhere make it so."""
    chosen: list[Change] = []
    now = plans.of(chosen)
    for change in free:
        if now is None or not _shortages(now) & change.helps:
            continue
        changed = plans.of([*chosen, change])
        if changed is not None and _shortages(changed) <= _shortages(now):
            chosen.append(change)
            now = changed
    return chosen


# --- smaller batches ------------------------------------------------------------------------------


def _smaller_batches(chosen: Sequence[Change], plans: _Plans) -> list[Change] | None:
    """Batches with which it fits beside the chosen changes; none where it does already.

    Activations shrink at most in proportion to the batch, so batches that are passed over as too
    large are so.
    """
    batches: dict[str, Change] = {}
    now = plans.of(chosen)
    while now is not None and not now.fits:
        sizes = _sizes_to_try(now)
        if sizes is None:
            return None
        batches |= {key: Change({key: size}, frozenset()) for key, size in sizes.items()}
        now = plans.of([*chosen, *batches.values()])
    return None if now is None else list(batches.values())


def _sizes_to_try(plan: Plan) -> dict[str, int] | None:
    """For every phase that is too big the largest batch that may fit, in quarters; None where none
    does."""
    if plan.host_is_too_small:
        return None
    batches = {
        "stack.micro_batch_size": plan.workspace.num_micro_rows,
        "rollout.forward_batch_size": _samples_at_once(plan.config),
    }
    sizes: dict[str, int] = {}
    for peak in _too_big(plan):
        key = BATCH_OF.get(peak.kind)
        size = None if key is None else _size_to_try(plan, peak, batches[key])
        if key is None or size is None:
            return None
        sizes[key] = min(size, sizes.get(key, size))
    return sizes


def _size_to_try(plan: Plan, peak: Peak, batch: int) -> int | None:
    budget = plan.target.budget_bytes
    assert budget is not None
    sizes = _quarters(batch)
    return next((s for s in sizes if _least_bytes(plan, peak, s / batch) <= budget), None)


def _least_bytes(plan: Plan, peak: Peak, share: float) -> int:
    """What the phase needs at least with this share of its batch."""
    space = plan.workspace
    smaller = replace(
        space,
        train=int(space.train * share),
        rollout=int(space.rollout * share),
        decode=int(space.decode * share),
    )
    gathered = peak.workspace_bytes - workspace_by_kind(plan.config, space, 0)[peak.kind]
    needed = workspace_by_kind(plan.config, smaller, gathered)[peak.kind]
    return peak.total_bytes - peak.workspace_bytes + needed


def _samples_at_once(config: RunConfig) -> int:
    """The largest batch of a device while it samples."""
    samples = math.ceil(config.batch_size / config.num_devices) * config.sampling.samples_per_prompt
    if config.eval_interval:
        for num_prompts, num_samples in config.eval_chunks:
            samples = max(samples, math.ceil(num_prompts / config.num_devices) * num_samples)
    return min(config.rollout.forward_batch_size or samples, samples)


def _quarters(size: int) -> Iterator[int]:
    """A quarter, a quarter of that, ..., 1."""
    while size > 1:
        size = max(1, size // 4)
        yield size


# --- estimates ------------------------------------------------------------------------------------


class RememberedWorkspace:
    """`estimate_workspace`, but what does not depend on where weights lie is worked out once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bool, Workspace]] = {}

    def __call__(self, config: RunConfig, blueprint: Blueprint) -> Workspace:
        wanted = config.backend.activation_checkpointing
        key = config.model_dump_json(
            include={
                "model": True,
                "sampling": True,
                "eval_sampling": True,
                "eval_interval": True,
                "eval_num_prompts": True,
                "eval_chunk_prompts": True,
                "eval_samples_per_prompt": True,
                "eval_suites": True,
                "eval_eta": True,
                "stack": True,
                "algorithm": True,
                "batch_size": True,
                "accumulate_rollouts": True,
                "num_devices": True,
                "rollout": {"forward_batch_size"},
            }
        )
        if key not in self._known:
            self._known[key] = (wanted, estimate_workspace(config, blueprint))
        checkpointing, space = self._known[key]
        if checkpointing == wanted:
            return space
        other = space.train_other_checkpointing
        return replace(space, train=other, train_other_checkpointing=space.train)
