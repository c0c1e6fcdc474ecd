"""Finding the modules that are sharded and recomputed one by one."""

from __future__ import annotations

import pytest
from peft.tuners.lora import LoraLayer
from torch import nn

from unirl.core.errors import ModelError
from unirl.models.blocks import block_names, find_blocks
from unirl.models.lora import attach_lora


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 1)
        self.pairs = nn.ModuleList([Pair(), Pair()])
        self.last = Layer()


def test_blocks_come_in_the_order_of_the_network() -> None:
    network = Network()
    first, second = network.pairs
    assert find_blocks(network, ["Pair"]) == [first, second]
    assert find_blocks(network, ["Conv2d", "Pair"]) == [network.stem, first, second]


def test_a_class_that_matches_nothing_is_an_error_that_lists_what_repeats() -> None:
    with pytest.raises(ModelError) as caught:
        find_blocks(Network(), ["Pair", "Transformer"])
    text = str(caught.value)
    assert "backend.block_classes" in text
    assert "['Transformer']" in text
    assert "'Pair'" in text  # the network has two
    assert "'Conv2d'" not in text  # and only one of these


def test_an_empty_list_is_an_error() -> None:
    with pytest.raises(ModelError, match="block_classes"):
        find_blocks(Network(), [])


def test_a_block_inside_another_is_an_error_that_names_both() -> None:
    with pytest.raises(ModelError, match=r"pairs\.0\.first lies inside pairs\.0; list only one"):
        find_blocks(Network(), ["Pair", "Layer"])


def test_names_found_before_an_adapter_lead_to_the_layers_it_wraps() -> None:
    network = Network()
    names = block_names(network, ["Linear"])
    attach_lora(network, 2, 4.0, ["linear"], seed=0)
    assert all(isinstance(network.get_submodule(name), LoraLayer) for name in names)
    assert len(names) == 5


def test_the_network_itself_is_no_block() -> None:
    """It is a unit of its own already, and everything lies inside it."""
    with pytest.raises(ModelError, match="block_classes"):
        find_blocks(Network(), ["Network", "Pair"])
