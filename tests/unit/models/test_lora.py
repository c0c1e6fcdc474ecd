"""LoRA on the denoising network."""

from __future__ import annotations

import pytest
import torch
from builders import (
    LATENT_SHAPE,
    prompts,
    randomize_adapter,
    same_bits,
    sampling_params,
    tiny_model,
)
from torch import Tensor, nn

from unirl.core.errors import ModelError
from unirl.models.lora import (
    adapter_disabled,
    adapter_parameters,
    attach_lora,
    merge_adapter,
    require_bound,
)
from unirl.models.tiny import TinyModel


def velocity(model: TinyModel) -> Tensor:
    latents = torch.randn(2, *LATENT_SHAPE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.velocity(
            latents,
            torch.tensor([0.9, 0.3]),
            model.encode(prompts("red cat", ""), sampling_params()),
        )


def test_a_fresh_adapter_does_not_change_the_output_and_a_trained_one_does():
    base, adapted = tiny_model(lora_rank=None), tiny_model()
    assert torch.equal(velocity(adapted), velocity(base))
    randomize_adapter(adapted)
    assert not torch.allclose(velocity(adapted), velocity(base), atol=1e-2)


def test_a_disabled_adapter_leaves_exactly_the_base_model():
    base, adapted = tiny_model(lora_rank=None), tiny_model()
    randomize_adapter(adapted)
    with adapter_disabled(adapted.network):
        assert torch.equal(velocity(adapted), velocity(base))


def test_the_adapter_is_active_and_trainable_again_after_an_error_inside():
    model = tiny_model()
    randomize_adapter(model)
    expected = velocity(model)
    with pytest.raises(KeyError), adapter_disabled(model.network):
        raise KeyError
    assert torch.equal(velocity(model), expected)
    assert all(p.requires_grad for p in adapter_parameters(model.network).values())


def test_only_the_adapter_is_trained_and_it_is_float32_on_a_bf16_base():
    model = tiny_model(frozen_dtype=torch.bfloat16)
    adapter = adapter_parameters(model.network)
    assert {p.dtype for p in adapter.values()} == {torch.float32}
    trained = {n for n, p in model.network.named_parameters() if p.requires_grad}
    assert trained == adapter.keys()
    assert len(adapter) == 2 * 4


def test_every_layer_named_by_its_last_part_gets_an_adapter():
    network = nn.ModuleDict(
        {f"block{i}": nn.ModuleDict({"fc1": nn.Linear(4, 4)}) for i in range(3)}
    )
    attach_lora(network, 2, 4.0, ["fc1"], seed=0)
    assert len(adapter_parameters(network)) == 3 * 2


def test_a_target_that_matches_nothing_is_refused_with_the_names_there_are():
    network = nn.ModuleDict({"fc1": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
    with pytest.raises(ModelError, match=r"\['c1', 'norm'\].*\['fc1'\]"):
        attach_lora(network, 2, 4.0, ["fc1", "c1", "norm"], seed=0)


def test_initial_weights_depend_on_the_seed_alone_and_the_global_generator_is_left_alone():
    def adapter(seed: int) -> dict[str, nn.Parameter]:
        network = nn.ModuleDict({"fc1": nn.Linear(4, 4), "fc2": nn.Linear(4, 4)})
        torch.manual_seed(seed + 100)
        expected = torch.randn(2)
        torch.manual_seed(seed + 100)
        attach_lora(network, 2, 4.0, ["fc1", "fc2"], seed)
        assert torch.equal(torch.randn(2), expected)
        return adapter_parameters(network)

    assert same_bits(adapter(0), adapter(0))
    assert not torch.equal(*(adapter(seed)["fc1.lora_A.default.weight"] for seed in (0, 1)))


def test_a_layer_of_the_name_that_takes_no_adapter_is_an_error():
    network = nn.ModuleDict({"a": nn.ModuleDict({"fc1": nn.Linear(4, 4)})})
    network["b"] = nn.ModuleDict({"fc1": nn.LayerNorm(4)})
    with pytest.raises(ModelError, match=r"target_modules=\['fc1'\].*LayerNorm"):
        attach_lora(network, 2, 4.0, ["fc1"], seed=0)


def test_an_adapter_that_is_not_on_every_layer_it_should_be_on_is_an_error():
    network = nn.ModuleDict({f"block{i}": nn.ModuleDict({"fc1": nn.Linear(4, 4)}) for i in (0, 1)})
    attach_lora(network, 2, 4.0, ["block0.fc1"], seed=0)
    require_bound(network, ["block0.fc1"])
    with pytest.raises(ModelError, match=r"names 2 layers.*on 1.*block1\.fc1"):
        require_bound(network, ["fc1"])


@pytest.mark.parametrize("kind", [{"use_dora": True}, {"use_rslora": True}], ids=["dora", "rslora"])
def test_other_kinds_of_lora_start_as_the_base_and_can_be_merged(kind):
    torch.manual_seed(0)
    network = nn.ModuleDict({"fc1": nn.Linear(6, 5)})
    inputs = torch.randn(3, 6)
    before = network["fc1"](inputs)
    attach_lora(network, 4, 8.0, ["fc1"], seed=0, **kind)
    torch.testing.assert_close(network["fc1"](inputs), before)
    with torch.no_grad():
        for name, parameter in adapter_parameters(network).items():
            if "lora_A" not in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    after = network["fc1"](inputs)
    assert (after - before).abs().max() > 0.1
    with adapter_disabled(network):
        torch.testing.assert_close(network["fc1"](inputs), before)
    merge_adapter(network)
    assert not adapter_parameters(network)
    torch.testing.assert_close(network["fc1"](inputs), after)


def test_rank_stabilised_lora_scales_by_the_root_of_the_rank():
    network = nn.ModuleDict({"fc1": nn.Linear(6, 5)})
    attach_lora(network, 4, 8.0, ["fc1"], seed=0, use_rslora=True)
    assert network["fc1"].scaling["default"] == 8.0 / 2
