"""What the train stack holds: its dtypes, parked and read, saved and restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import (
    offload,
    onload,
    same_bits,
    tiny_model,
    train_stack,
)
from safetensors.torch import save_file
from stacks import roll_out, state, trained
from torch import Tensor

from unirl.core.components import Moved
from unirl.core.errors import ModelError, ResidencyError
from unirl.models.lora import adapter_parameters
from unirl.train.optimizer import moment_tensors
from unirl.train.stack import TrainStack


def adapter_and_optimizer(stack: TrainStack) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return stack.weights.state_tensors(adapter_only=True), stack.weights.optimizer_state()


# --- dtypes and what is trained -------------------------------------------------------------------


def test_bf16_storage_keeps_the_trained_weights_and_moments_in_float32():
    model = tiny_model(frozen_dtype=torch.bfloat16, compute_dtype=torch.bfloat16)
    stack = train_stack(model)
    stack.update([roll_out(model)])
    adapter = adapter_parameters(model.network)
    assert {p.dtype for p in adapter.values()} == {torch.float32}
    base = {p.dtype for n, p in model.network.named_parameters() if n not in adapter}
    assert base == {torch.bfloat16}
    assert {moment.dtype for moment in moment_tensors(stack.weights.optimizer)} == {torch.float32}


def test_a_model_with_nothing_to_train_is_refused():
    model = tiny_model()
    model.network.requires_grad_(False)
    with pytest.raises(ModelError, match="nothing to train"):
        train_stack(model)


# --- parking --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora_rank", [2, None])
def test_parking_between_updates_does_not_change_a_bit(lora_rank):
    def train(parks: bool) -> dict[str, Tensor]:
        model = tiny_model(lora_rank=lora_rank)
        stack = train_stack(model)
        for window in range(3):
            one = roll_out(model, key=f"window-{window}")
            if parks:
                offload(stack)
                onload(stack)
            stack.update([one])
        return state(stack)

    assert same_bits(train(parks=False), train(parks=True))


def test_a_cold_stack_parks_its_base_once_and_then_only_what_a_step_wrote():
    model = tiny_model()
    stack = train_stack(model)
    size = {
        name: sum(p.numel() * 4 for p in part)
        for name, part in {
            "adapter": list(adapter_parameters(model.network).values()),
            "all": list(model.network.parameters()),
            "buffers": list(model.network.buffers()),
        }.items()
    }
    base = size["all"] - size["adapter"]
    one = roll_out(model)
    assert offload(stack) == Moved(size["all"] + size["buffers"])
    onload(stack)
    assert offload(stack) == Moved(size["buffers"], size["all"])
    assert onload(stack) == Moved(size["all"] + size["buffers"])
    stack.update([one])
    with_moments = 3 * size["adapter"]
    assert offload(stack) == Moved(with_moments + size["buffers"], base)
    assert onload(stack) == Moved(with_moments + size["buffers"] + base)


def test_a_parked_stack_refuses_to_work():
    model = tiny_model()
    stack = train_stack(model)
    one = roll_out(model)
    tensors, optimizer = (
        stack.weights.state_tensors(adapter_only=True),
        stack.weights.optimizer_state(),
    )
    offload(stack)
    uses = {
        "update": lambda: stack.update([one]),
        "load": lambda: stack.weights.load_state(tensors, {}, optimizer),
    }
    for action, use in uses.items():
        with pytest.raises(ResidencyError, match=f"{action} while parked"):
            use()
    onload(stack)
    stack.update([one])


def test_a_parked_stack_is_read_and_saved_from_the_host_and_nothing_moves():
    model = tiny_model()
    stack = train_stack(model)
    stack.update([roll_out(model)])
    there = stack.weights.state_tensors(adapter_only=False), stack.weights.optimizer_state()
    read = stack.weights.read_weights(adapter=True, with_probe=True)
    offload(stack)
    parked = stack.weights.state_tensors(adapter_only=False), stack.weights.optimizer_state()
    read_parked = stack.weights.read_weights(adapter=True, with_probe=True)
    assert not any(part.is_resident for part in stack.parts)
    assert same_bits(parked[0], there[0])
    assert same_bits(read_parked.tensors, read.tensors)
    assert read.probe is not None
    assert read_parked.probe is None, "it takes the device to answer one"
    for index, moments in there[1]["optimizer"]["state"].items():
        assert same_bits(parked[1]["optimizer"]["state"][index], moments)


def test_a_step_that_fails_halfway_has_changed_the_version(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model()
    stack = train_stack(model)

    def fails() -> None:
        raise RuntimeError("halfway")

    monkeypatch.setattr(stack.weights.optimizer, "step", fails)
    with pytest.raises(RuntimeError, match="halfway"):
        stack.update([roll_out(model)])
    assert stack.weight_version == 1, "what was read before must not pass for current"


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("lora_rank", "adapter_only"), [(2, True), (2, False), (None, False)])
def test_a_restored_stack_goes_on_exactly_where_it_stood(lora_rank, adapter_only):
    stack = trained({"stack.scheduler.type": "cosine"}, lora_rank=lora_rank)
    saved = stack.weights.state_tensors(adapter_only), {}, stack.weights.optimizer_state()
    resumed = train_stack(tiny_model(lora_rank=lora_rank), {"stack.scheduler.type": "cosine"})
    resumed.weights.load_state(*saved)
    assert resumed.weight_version == stack.weight_version == 2
    for each in (stack, resumed):
        each.update([roll_out(each.model, key="next")])  # type: ignore[arg-type]
    assert same_bits(state(stack), state(resumed))


def test_a_restored_stack_parks_its_new_weights():
    stack = trained({})
    tensors, optimizer = adapter_and_optimizer(stack)
    resumed = train_stack(tiny_model())
    offload(resumed)
    onload(resumed)
    resumed.weights.load_state(tensors, {}, optimizer)
    offload(resumed)
    onload(resumed)
    assert same_bits(state(resumed), state(stack))


@pytest.mark.parametrize("misfit", ["missing", "unexpected", "shape", "empty"])
def test_weights_that_do_not_fit_are_refused_with_nothing_written(misfit):
    stack = trained({})
    tensors, optimizer = (
        stack.weights.state_tensors(adapter_only=True),
        stack.weights.optimizer_state(),
    )
    name = next(iter(tensors))
    match misfit:
        case "missing":
            del tensors[name]
        case "unexpected":
            tensors["other.weight"] = torch.zeros(1)
        case "shape":
            tensors[name] = torch.zeros(1, 1)
        case "empty":
            tensors.clear()
    other = train_stack(tiny_model())
    before = state(other)
    with pytest.raises(ModelError, match="weights do not fit"):
        other.weights.load_state(tensors, {}, optimizer)
    assert same_bits(state(other), before)
    assert other.weight_version == 0


def test_an_optimizer_state_that_does_not_fit_is_refused_with_nothing_written():
    stack = trained({})
    tensors, optimizer = (
        stack.weights.state_tensors(adapter_only=True),
        stack.weights.optimizer_state(),
    )
    moments = optimizer["optimizer"]["state"]
    moments[0], moments[1] = moments[1], moments[0]
    other = train_stack(tiny_model())
    before = state(other)
    with pytest.raises(ModelError, match="optimizer state does not fit"):
        other.weights.load_state(tensors, {}, optimizer)
    assert same_bits(state(other), before)


def test_settings_of_the_optimizer_come_from_the_recipe_not_from_the_checkpoint():
    stack = trained({"stack.optimizer.weight_decay": 0.0})
    changed = {"stack.optimizer.weight_decay": 0.25, "stack.optimizer.adam_beta1": 0.5}
    resumed = train_stack(tiny_model(), changed)
    resumed.weights.load_state(
        stack.weights.state_tensors(adapter_only=True), {}, stack.weights.optimizer_state()
    )
    (group,) = resumed.weights.optimizer.param_groups
    assert (group["weight_decay"], group["betas"][0]) == (0.25, 0.5)


def test_a_saved_stack_can_still_be_parked(tmp_path):
    stack = trained({}, num_windows=1)
    torch.save(stack.weights.optimizer_state(), tmp_path / "optimizer.pt")
    save_file(stack.weights.state_tensors(adapter_only=False), tmp_path / "weights.safetensors")
    before = state(stack)
    offload(stack)
    onload(stack)
    assert same_bits(state(stack), before)


def test_what_is_saved_is_a_copy():
    stack = trained({}, num_windows=1)
    saved = stack.weights.state_tensors(adapter_only=True)
    copies = {name: value.clone() for name, value in saved.items()}
    stack.update([roll_out(stack.model)])  # type: ignore[arg-type]
    assert same_bits(saved, copies)
