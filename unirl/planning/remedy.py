"""What to change in a recipe whose plan does not fit: the smallest change that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from unirl.config import checks
from unirl.config.components import engine_capabilities
from unirl.config.schema import RunConfig
from unirl.core.errors import ConfigError
from unirl.planning.plan import Plan

Change = tuple[str, Any]
"""A key and its new value."""


def smallest_change(plan: Plan, replan: Callable[[RunConfig], Plan]) -> list[Change] | None:
    """Overrides of the plan's recipe with which it fits; None when nothing that is known helps.

    One change if one is enough, the cheapest in speed first; otherwise as many as it takes, without
    those that turn out not to be needed.
    """
    changes = list(_changes(plan.config))

    def fits(some: list[Change]) -> bool:
        changed = _with(plan.config, some)
        if changed is None:
            return False
        try:
            return replan(changed).fits
        except ConfigError:
            return False

    for change in changes:
        if fits([change]):
            return [change]
    chosen: list[Change] = []
    for change in changes:
        if _with(plan.config, [*chosen, change]) is None:
            continue
        chosen.append(change)
        if len(chosen) > 1 and fits(chosen):
            return _without_needless(chosen, fits)
    return None


def _without_needless(chosen: list[Change], fits: Callable[[list[Change]], bool]) -> list[Change]:
    """The last one made it fit. The others go, the dearest first, where it fits without them."""
    for change in reversed(chosen[:-1]):
        rest = [other for other in chosen if other is not change]
        if fits(rest):
            chosen = rest
    return list(dict(chosen).items())  # of two values for a key, the later


def _changes(config: RunConfig) -> Iterator[Change]:
    """What may help, from what costs nothing to what costs most."""
    resident = config.resident
    if config.residency == "policy":
        for role in ("reward", "rollout", "train"):
            if resident[role]:
                yield f"{role}_resident", False
    if engine_capabilities(config).shares_base and not config.rollout.share_base:
        yield "rollout.share_base", True
    if not config.backend.activation_checkpointing:
        yield "backend.activation_checkpointing", True
    batch = config.batch_size * config.sampling.samples_per_prompt
    for size in _quarters(config.rollout.forward_batch_size or batch):
        yield "rollout.forward_batch_size", size
    for size in _quarters(config.stack.micro_batch_size):
        yield "stack.micro_batch_size", size


def _quarters(size: int) -> Iterator[int]:
    """A quarter of it, a quarter of that, ..., 1."""
    while size > 1:
        size = max(1, size // 4)
        yield size


def _with(config: RunConfig, changes: list[Change]) -> RunConfig | None:
    """The recipe with these changes; None when it may not be run so."""
    tree = config.model_dump()
    for key, value in changes:
        *blocks, last = key.split(".")
        block = tree
        for name in blocks:
            block = block[name]
        block[last] = value
    changed = RunConfig.model_validate(tree)
    known = {problem.key for problem in checks.problems(config)}
    new = [problem for problem in checks.problems(changed) if problem.key not in known]
    return None if new else changed
