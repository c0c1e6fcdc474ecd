"""The blocks of a network: modules of the classes a family lists, sharded and checkpointed one by
one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from unirl.core.errors import ModelError


def find_blocks(network: nn.Module, class_names: Sequence[str]) -> list[nn.Module]:
    """Modules of these classes in the order of the network; raises like `block_names`."""
    return [network.get_submodule(name) for name in block_names(network, class_names)]


def block_names(network: nn.Module, class_names: Sequence[str]) -> list[str]:
    """Names of the modules of these classes, in the order of the network.

    Ask before an adapter is attached: it wraps layers in classes of its own, under their names.
    Raises ModelError when a class matches nothing, or one block lies inside another.
    """
    inside = [(name, module) for name, module in network.named_modules() if name]
    found = [(name, module) for name, module in inside if type(module).__name__ in class_names]
    missing = set(class_names) - {type(module).__name__ for _, module in found}
    if missing or not found:
        repeated = Counter(type(module).__name__ for _, module in inside)
        raise ModelError(
            f"backend.block_classes: {sorted(missing)} match nothing in the network. Classes it "
            f"has more than one of: {sorted(name for name, n in repeated.items() if n > 1)}."
        )
    names = [name for name, _ in found]
    for name in names:
        outer = [other for other in names if name.startswith(f"{other}.")]
        if outer:
            raise ModelError(
                f"backend.block_classes: {name} lies inside {outer[0]}; list only one of the two."
            )
    return names
