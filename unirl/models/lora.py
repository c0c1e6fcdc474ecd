"""LoRA on a denoising network, through PEFT: attach, find, switch off."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from unirl.core.errors import ModelError
from unirl.samplers.noise import seed_of

ADAPTER_NAME = "default"


def attach_lora(
    network: nn.Module,
    rank: int,
    alpha: float,
    target_modules: Sequence[str],
    seed: int,
    *,
    use_rslora: bool = False,
    use_dora: bool = False,
) -> None:
    """Inject a LoRA adapter (B = 0, so outputs do not change) and freeze everything else.

    Adapter weights are float32 whatever the base is stored in: updates of 1e-4 would be lost to
    bf16 rounding. On the meta device they get no values; `initial_value` has
    them. Raises ModelError when a target name matches no linear layer, or a layer of that name is
    left without an adapter.
    """
    unmatched = [name for name in target_modules if not _matches(network, name)]
    if unmatched:
        linear = sorted(
            {name.split(".")[-1] for name, m in network.named_modules() if isinstance(m, nn.Linear)}
        )
        raise ModelError(
            f"stack.lora.target_modules: {unmatched} match no linear layer of the network. "
            f"Its linear layers end in {linear}."
        )
    network.requires_grad_(False)
    adapter = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  (a float works and is kept)
        target_modules=list(target_modules),
        use_rslora=use_rslora,
        use_dora=use_dora,
    )
    try:
        with torch.random.fork_rng(devices=[]):  # PEFT draws values too, which are overwritten
            inject_adapter_in_model(adapter, network, adapter_name=ADAPTER_NAME)
    except ValueError as error:  # a layer of another kind has the name too
        raise ModelError(f"stack.lora.target_modules={list(target_modules)}: {error}") from error
    require_bound(network, target_modules)
    for name, parameter in adapter_parameters(network).items():
        parameter.data = parameter.data.float()
        # DoRA's lengths start as those of the base weights, which PEFT has put there.
        if not parameter.is_meta and ".lora_magnitude_vector." not in name:
            parameter.data.copy_(initial_value(name, parameter.shape, seed))


def require_bound(network: nn.Module, target_modules: Sequence[str]) -> None:
    """Raise ModelError unless every layer that a target names has an adapter, and no other has."""
    bound, named = set(), set()
    for name, module in network.named_modules():
        if ".lora_" in name or name.endswith(".base_layer"):
            continue
        if isinstance(module, LoraLayer):
            bound.add(name)
        if any(name == target or name.endswith("." + target) for target in target_modules):
            named.add(name)
    if bound != named:
        lacking, extra = sorted(named - bound), sorted(bound - named)
        raise ModelError(
            f"stack.lora.target_modules names {len(named)} layers, the adapter is on {len(bound)}: "
            f"without one are {lacking[:4]}, unasked {extra[:4]}. Name linear layers only."
        )


def initial_value(name: str, shape: torch.Size, seed: int) -> Tensor:
    """The start of one adapter weight, float32 on the CPU: A as PEFT draws it, B zero.

    A function of name and seed, so that it does not matter where and in what order it is drawn.
    """
    value = torch.zeros(shape)
    if ".lora_A." in name:
        generator = torch.Generator().manual_seed(seed_of(f"{seed}/{name}"))
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return value


def _matches(network: nn.Module, target: str) -> bool:
    return any(
        isinstance(module, nn.Linear) and (name == target or name.endswith("." + target))
        for name, module in network.named_modules()
    )


@torch.no_grad()
def merge_adapter(network: nn.Module) -> None:
    """Add the adapter to the weights it is on and take it away; nothing happens without one."""
    layers = [(n, m) for n, m in network.named_modules() if isinstance(m, LoraLayer)]
    for name, layer in layers:
        layer.merge()
        parent, _, child = name.rpartition(".")
        setattr(network.get_submodule(parent), child, layer.get_base_layer())


def adapter_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's parameters by name; empty without an adapter."""
    return {name: p for name, p in network.named_parameters() if ".lora_" in name}


@contextmanager
def adapter_disabled(network: nn.Module) -> Iterator[None]:
    """Run the network as if it had no adapter; it is active again afterwards, also on an error."""
    layers = [module for module in network.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
