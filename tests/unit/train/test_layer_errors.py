"""Each layer against itself in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from unirl.train.layer_errors import layer_errors


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.linear = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(self.convolution(x)).mean(dim=(2, 3)))


def test_every_call_of_every_layer_is_compared_and_nothing_stays_behind() -> None:
    network, x = Network(), torch.randn(2, 3, 8, 8)
    expected = network(x)
    with torch.autocast("cpu", torch.bfloat16), layer_errors(network) as found:
        network(x)
        network(x)
    assert [one.name for one in found] == 2 * ["convolution", "norm", "linear"]
    assert [one.kind for one in found[:3]] == ["Conv2d", "GroupNorm", "Linear"]
    assert all(0 <= one.error < 0.02 for one in found)
    assert found[0].error > 0
    network(x)
    assert len(found) == 6
    assert torch.equal(network(x), expected)


def test_float32_is_no_different() -> None:
    network = Network()
    with layer_errors(network) as found:
        network(torch.randn(2, 3, 8, 8))
    assert [one.error for one in found] == [0, 0, 0]


def test_stored_bfloat16_weights_are_compared_with_what_they_hold() -> None:
    network = Network().to(torch.bfloat16)
    with layer_errors(network) as found:
        network(torch.randn(2, 3, 8, 8, dtype=torch.bfloat16))
    assert all(0 < one.error < 0.02 for one in found)


def test_an_error_of_the_network_leaves_no_hooks() -> None:
    network = Network()
    with pytest.raises(RuntimeError), layer_errors(network) as found:
        network(torch.randn(2, 7, 8, 8))
    assert found == []
    network(torch.randn(2, 3, 8, 8))
    assert found == []
