"""Values for a network that was made without any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from unirl.core.errors import ModelError
from unirl.models.filling import fill_from_files


def parameters(**shapes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}


def filled(wanted: Mapping[str, nn.Parameter], *files: Path) -> dict[str, Tensor]:
    """What each parameter was given."""
    names = {id(parameter): name for name, parameter in wanted.items()}
    given: dict[str, Tensor] = {}

    def write(parameter: nn.Parameter, whole: Tensor) -> None:
        assert names[id(parameter)] not in given
        given[names[id(parameter)]] = whole

    fill_from_files(wanted, {"": files}, write)
    return given


def test_each_parameter_gets_the_tensor_of_its_name_from_any_file(tmp_path: Path) -> None:
    a, b = torch.randn(2, 3), torch.randn(4)
    save_file({"a": a, "unused": torch.zeros(1)}, tmp_path / "1.safetensors")
    save_file({"b": b}, tmp_path / "2.safetensors")
    files = (tmp_path / "1.safetensors", tmp_path / "2.safetensors")
    given = filled(parameters(a=(2, 3), b=(4,)), *files)
    assert torch.equal(given.pop("a"), a)
    assert torch.equal(given.pop("b"), b)
    assert not given


def test_a_layer_inside_an_adapter_is_found_under_its_own_name(tmp_path: Path) -> None:
    weight = torch.randn(2, 2)
    save_file({"blocks.0.proj.weight": weight}, tmp_path / "1.safetensors")
    wanted = parameters(**{"blocks.0.proj.base_layer.weight": (2, 2)})
    given = filled(wanted, tmp_path / "1.safetensors")
    assert torch.equal(given["blocks.0.proj.base_layer.weight"], weight)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "1.safetensors")
    with pytest.raises(ModelError, match=r"1\.safetensors.* lack 1 tensors: \['b'\]"):
        filled(parameters(a=(1,), b=(1,)), tmp_path / "1.safetensors")


def test_no_files_is_an_error() -> None:
    with pytest.raises(ModelError, match="lack 1 tensors"):
        filled(parameters(a=(1,)))


def test_a_wrong_shape_is_an_error_with_both_shapes(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "1.safetensors")
    with pytest.raises(ModelError, match=r"a is \(2, 3\), the network has \(3, 2\)"):
        filled(parameters(a=(3, 2)), tmp_path / "1.safetensors")
