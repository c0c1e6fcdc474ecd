"""Tensors that are made of others: quantised weights hold integers and scales behind one face."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors whose memory it is: itself, unless it wraps others."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    wrapped: Any = tensor
    names, _ = wrapped.__tensor_flatten__()
    for name in names:
        yield from plain_tensors(getattr(wrapped, name))
