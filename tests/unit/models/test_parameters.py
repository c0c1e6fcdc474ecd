"""Overwriting parameters by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unirl.core.errors import ModelError
from unirl.models.parameters import copy_into


def parameters() -> dict[str, nn.Parameter]:
    return {"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2, 3))}


def test_values_are_copied_in_place_and_into_the_parameters_dtype():
    held = parameters()
    held["a"].data = held["a"].data.bfloat16()
    before = dict(held)
    copy_into(held, {"a": torch.ones(2), "b": torch.ones(2, 3)})
    assert all(held[name] is before[name] for name in held)
    assert held["a"].dtype == torch.bfloat16
    assert all(bool((p == 1).all()) for p in held.values())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": (2,)}, r"bound 1 of 2 tensors, missing \['b'\]"),
        ({"a": (2,), "b": (2, 3), "c": (1,)}, r"unexpected \['c'\]"),
        ({"a": (2,), "b": (3, 2)}, r"wrong shape \['b: \(3, 2\) instead of \(2, 3\)'\]"),
        ({"x": (2,), "y": (2, 3)}, "bound 0 of 2"),
        ({"a": (1,), "b": (2, 3)}, "wrong shape"),
        ({}, "bound 0 of 2"),
    ],
    ids=["missing", "unexpected", "transposed", "renamed", "broadcastable", "empty"],
)
def test_anything_but_an_exact_fit_is_refused_with_nothing_written(tensors, message):
    held = parameters()
    with pytest.raises(ModelError, match=message):
        copy_into(held, {name: torch.ones(shape) for name, shape in tensors.items()})
    assert not any(bool(p.any()) for p in held.values())


def test_binding_nothing_to_nothing_is_an_error_not_a_success():
    with pytest.raises(ModelError, match="bound 0 of 0"):
        copy_into({}, {})
