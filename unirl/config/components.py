"""From the name in a recipe to the component: its capabilities, or the user's own class.

A name is a key of a table of `config.catalog` or `package.module:Class`. Own engines and algorithms
declare what they can do in a class attribute `capabilities`, like the built-in ones.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection
from typing import Any, TypeVar

from unirl.config import catalog
from unirl.config.keys import nearest_name
from unirl.config.schema import RunConfig
from unirl.core.capabilities import AlgorithmCapabilities, EngineCapabilities, SyncCapabilities
from unirl.core.errors import ConfigError

T = TypeVar("T")


def is_own(name: str) -> bool:
    """Whether a name is a dotted path to a class of the user's."""
    return ":" in name


def import_component(path: str) -> type[Any]:
    """The class at `package.module:Class`; raises ConfigError saying why it cannot be had."""
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises belongs in the message
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"is {path!r}, but importing {module_name!r} failed: {reason}") from error
    try:
        component = getattr(module, class_name)
    except AttributeError:
        near = nearest_name(class_name, vars(module))
        found = f"{module_name!r} ({module.__file__}) has no {class_name!r}"
        raise ConfigError(f"is {path!r}, but {found}.{near}") from None
    if not isinstance(component, type):
        raise ConfigError(f"is {path!r}, but {class_name!r} is not a class.")
    return component


def require_known(name: str, table: Collection[str]) -> None:
    """Raise ConfigError unless `name` is in the table or a class that can be imported."""
    if is_own(name):
        import_component(name)
    elif name not in table:
        near = nearest_name(name, table)
        allowed = ", ".join(sorted(table))
        raise ConfigError(
            f"is {name!r}; built in are: {allowed}.{near} Your own is written package.module:Class."
        )


def absent_packages(scorer: str) -> list[str]:
    """Packages that a built-in scorer needs and that are not installed."""
    if is_own(scorer):
        return []
    packages = catalog.SCORERS[scorer].requires
    return [name for name in packages if importlib.util.find_spec(name) is None]


def engine_capabilities(config: RunConfig) -> EngineCapabilities:
    """What the rollout engine can do; raises ConfigError when it is unknown."""
    require_known(config.rollout.engine, catalog.ENGINES)
    if is_own(config.rollout.engine):
        return _declared(config.rollout.engine, EngineCapabilities)
    return catalog.ENGINES[config.rollout.engine].capabilities


def algorithm_capabilities(config: RunConfig) -> AlgorithmCapabilities:
    """What the algorithm needs; raises ConfigError when it is unknown."""
    require_known(config.algorithm.path, catalog.ALGORITHMS)
    if is_own(config.algorithm.path):
        return _declared(config.algorithm.path, AlgorithmCapabilities)
    return catalog.ALGORITHMS[config.algorithm.path].capabilities


def sync_name(config: RunConfig) -> str | None:
    """Key in catalog.SYNCS of the weight sync that is used; None where weights are shared."""
    if engine_capabilities(config).shares_train_weights:
        return None
    return "full" if config.stack.lora is None else "lora"


def sync_capabilities(config: RunConfig) -> SyncCapabilities | None:
    """What the weight sync can do; None where weights are shared."""
    name = sync_name(config)
    return None if name is None else catalog.SYNCS[name].capabilities


def _declared(path: str, kind: type[T]) -> T:
    try:
        declared = import_component(path).capabilities
    except AttributeError:
        declared = None
    if not isinstance(declared, kind):
        raise ConfigError(
            f"is {path!r}, which must declare `capabilities = {kind.__name__}(...)` in its class."
        )
    return declared
