"""What to change in a recipe whose plan does not fit: the smallest change that does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unirl.config import checks
from unirl.config.components import engine_capabilities
from unirl.config.schema import RunConfig
from unirl.core.errors import ConfigError
from unirl.planning.blueprint import Blueprint
from unirl.planning.plan import Plan
from unirl.planning.workspace import Workspace, estimate_workspace
from unirl.residency.policy import Role
from unirl.residency.timeline import PhaseKind


@dataclass(frozen=True)
class Change:
    """A key, its new value, and the roles whose phases it can make smaller."""

    key: str
    value: Any
    helps: Collection[Role]

    def __str__(self) -> str:
        return f"{self.key}={str(self.value).lower()}"


def smallest_change(plan: Plan, replan: Callable[[RunConfig], Plan]) -> list[Change] | None:
    """Overrides of the plan's recipe with which it fits; None when nothing that is known helps.

    What costs speed least is tried first, alone; then changes are added up until it fits, and those
    that turn out not to be needed are taken out again.
    """
    for change in _free_changes(plan.config):
        if (changed := _replanned([change], plan, replan)) is not None and changed.fits:
            return [change]
    chosen = _added_up(plan, replan)
    if chosen is None:
        return None
    for change in chosen[:-1]:
        rest = [other for other in chosen if other is not change]
        changed = _replanned(rest, plan, replan)
        if changed is not None and changed.fits:
            chosen = rest
    return list({change.key: change for change in chosen}.values())  # of one key, the last value


def _added_up(plan: Plan, replan: Callable[[RunConfig], Plan]) -> list[Change] | None:
    """Changes that fit together; only such as help in a phase that is too big."""
    chosen: list[Change] = []
    now = plan
    for change in [*_free_changes(plan.config), *_batch_changes(plan.config)]:
        if not {kind.role for kind in _too_big(now)} & set(change.helps):
            continue
        changed = _replanned([*chosen, change], plan, replan)
        if changed is None:
            continue
        chosen.append(change)
        now = changed
        if now.fits:
            return chosen
    return None


def _too_big(plan: Plan) -> list[PhaseKind]:
    budget = plan.target.budget_bytes
    return [p.kind for p in plan.peaks if budget is not None and p.total_bytes > budget]


def _free_changes(config: RunConfig) -> Iterator[Change]:
    """Those that train the same way, only slower."""
    if config.residency == "policy":
        for role in (Role.REWARD, Role.ROLLOUT, Role.TRAIN):
            if config.resident[role.value]:
                yield Change(f"{role.value}_resident", False, set(Role) - {role})
    if engine_capabilities(config).shares_base and not config.rollout.share_base:
        yield Change("rollout.share_base", True, {Role.TRAIN, Role.ROLLOUT})
    if not config.backend.activation_checkpointing:
        yield Change("backend.activation_checkpointing", True, {Role.TRAIN})
    if config.optimizer_resident:
        yield Change("optimizer_resident", False, {Role.TRAIN})


def _batch_changes(config: RunConfig) -> Iterator[Change]:
    """Smaller batches: a quarter, a quarter of that, ..., 1."""
    samples = config.batch_size * config.sampling.samples_per_prompt
    for size in _quarters(config.rollout.forward_batch_size or samples):
        yield Change("rollout.forward_batch_size", size, {Role.ROLLOUT})
    for size in _quarters(config.stack.micro_batch_size):
        yield Change("stack.micro_batch_size", size, {Role.TRAIN})


def _quarters(size: int) -> Iterator[int]:
    while size > 1:
        size = max(1, size // 4)
        yield size


def _replanned(
    changes: Sequence[Change], plan: Plan, replan: Callable[[RunConfig], Plan]
) -> Plan | None:
    """The plan with these changes; None when the recipe may not be run so."""
    tree = plan.config.model_dump()
    for change in changes:
        *blocks, last = change.key.split(".")
        block = tree
        for name in blocks:
            block = block[name]
        block[last] = change.value
    changed = RunConfig.model_validate(tree)
    known = {problem.key for problem in checks.problems(plan.config)}
    if any(problem.key not in known for problem in checks.problems(changed)):
        return None
    try:
        return replan(changed)
    except ConfigError:
        return None


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
