"""Two networks of one architecture that use the same memory for their frozen weights."""

from __future__ import annotations

from torch import nn

from unirl.core.errors import ResidencyError


def share_base(borrower: nn.Module, owner: nn.Module) -> None:
    """Make the borrower's frozen parameters the owner's memory.

    Parameter objects stay; only what they point at changes. Raises ResidencyError, with nothing
    changed, when the two do not have the same frozen tensors in the same layout.
    """
    lent = {name: p for name, p in owner.named_parameters() if not p.requires_grad}
    borrowed = {name: p for name, p in borrower.named_parameters() if not p.requires_grad}
    differing = sorted(lent.keys() ^ borrowed.keys()) or [
        name for name, p in borrowed.items() if _layout(p) != _layout(lent[name])
    ]
    if differing:
        raise ResidencyError(
            f"rollout.share_base: the engine's network and the trained one differ in "
            f"{len(differing)} frozen tensors, first {differing[0]}. Set rollout.share_base=false."
        )
    for name, parameter in borrowed.items():
        parameter.data = lent[name].data


def _layout(parameter: nn.Parameter) -> tuple[object, ...]:
    return parameter.shape, parameter.stride(), parameter.dtype
