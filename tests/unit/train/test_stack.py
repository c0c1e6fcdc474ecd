"""The update loop: what a step changes, when it is skipped, and what a checkpoint gets back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import (
    offload,
    onload,
    policy,
    randomize_adapter,
    rollout_request,
    same_bits,
    sample,
    scored,
    tiny_model,
    train_stack,
    weights,
)
from safetensors.torch import save_file
from torch import Tensor

from unirl.algorithms.flow_grpo import RatioRows
from unirl.core.components import Moved
from unirl.core.errors import ModelError, ResidencyError, TrainingError
from unirl.core.types import ScoredRollout
from unirl.models.lora import adapter_parameters
from unirl.models.tiny import TinyModel
from unirl.train.optimizer import moment_tensors
from unirl.train.stack import TrainStack


def roll_out(model: TinyModel, **request: Any) -> ScoredRollout:
    return scored(sample(model, rollout_request(**request), forward_batch_size=4))


def trained(overrides: Mapping[str, Any], num_windows: int = 2, **model: Any) -> TrainStack:
    """A stack after some windows of on-policy training."""
    tiny = tiny_model(**model)
    stack = train_stack(tiny, overrides)
    for window in range(num_windows):
        stack.update([roll_out(tiny, key=f"window-{window}")])
    return stack


def state(stack: TrainStack) -> dict[str, Tensor]:
    moments = moment_tensors(stack._optimizer)
    named = {f"moment-{i}": moment.clone() for i, moment in enumerate(moments)}
    return stack.state_tensors(adapter_only=False) | named


# --- a step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute_dtype", "frozen_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_after_a_step_the_next_micro_batch_sees_the_new_weights(compute_dtype, frozen_dtype):
    model = tiny_model(compute_dtype=compute_dtype, frozen_dtype=frozen_dtype)
    stack = train_stack(
        model, {"stack.num_updates_per_batch": 2, "stack.optimizer.learning_rate": 1e-2}
    )
    first, second = stack.update([roll_out(model)])
    assert (first.metrics["ratio_min"], first.metrics["ratio_max"]) == (1, 1)
    assert first.metrics["log_ratio_abs_max"] == 0
    assert second.metrics["log_ratio_abs_max"] > 1e-5
    assert stack.weight_version == 2


def test_the_version_counts_steps_and_the_gradient_is_dropped_after_each():
    stack = trained({"stack.num_updates_per_batch": 2}, num_windows=2)
    assert stack.weight_version == 4
    assert all(p.grad is None for p in stack.model.network.parameters())


@pytest.mark.parametrize("lora_rank", [2, None])
def test_exactly_the_trained_weights_change(lora_rank):
    model = tiny_model(lora_rank=lora_rank)
    before = weights(model)
    train_stack(model, {"stack.optimizer.weight_decay": 0.1}).update([roll_out(model)])
    changed = {n for n, value in weights(model).items() if not torch.equal(value, before[n])}
    if lora_rank is None:
        assert changed == before.keys()
    else:
        # A gets no gradient while B is 0, but weight decay moves it.
        assert changed == adapter_parameters(model.network).keys()


def test_positive_advantages_become_likelier_with_training():
    model = tiny_model()
    one = roll_out(model)
    stack = train_stack(model, {"stack.optimizer.learning_rate": 3e-3, "algorithm.clip_range": 0.2})
    for _ in range(5):
        stack.update([one])
    rows = stack._algorithm.rows([one])
    old = RatioRows(rows, rows.rollout_log_prob)
    log_ratio = stack._algorithm.loss(policy(model), old).details["log_ratio"]
    assert float(log_ratio[rows.advantages > 0].mean()) > 0
    assert float(log_ratio[rows.advantages < 0].mean()) < 0


@pytest.mark.parametrize("micro_batch_size", [1, 3, 16])
def test_accumulating_small_slices_equals_one_big_batch(micro_batch_size):
    def gradient_norm_and_weights(size: int) -> tuple[float, dict[str, Tensor]]:
        model = tiny_model()
        randomize_adapter(model)
        overrides = {"stack.micro_batch_size": size, "stack.max_grad_norm": 1e9}
        # SGD-like: at epsilon 1 Adam's step is proportional to the gradient, not its sign.
        stack = train_stack(model, overrides | {"stack.optimizer.adam_epsilon": 1.0})
        (stats,) = stack.update([roll_out(model)])
        return stats.metrics["grad_norm"], weights(model)

    (norm, changed), (other_norm, other) = (
        gradient_norm_and_weights(size) for size in (8, micro_batch_size)
    )
    assert other_norm == pytest.approx(norm, rel=1e-4)
    for name, value in changed.items():
        torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-7)


def test_a_window_of_two_rollouts_weighs_their_samples_equally():
    model = tiny_model()
    randomize_adapter(model)
    one, two = roll_out(model), roll_out(model, key="other")

    def gradient_norm(window: list[ScoredRollout]) -> float:
        stack = train_stack(tiny_copy(model))
        return stack.update(window)[0].metrics["grad_norm"]

    assert gradient_norm([one, one]) == pytest.approx(gradient_norm([one]), rel=1e-4)
    assert gradient_norm([one, two]) != pytest.approx(gradient_norm([one]), rel=1e-2)


def tiny_copy(model: TinyModel) -> TinyModel:
    copy = tiny_model()
    copy.network.load_state_dict(model.network.state_dict())
    return copy


def test_each_update_trains_on_its_own_part_of_the_samples():
    model = tiny_model()
    one = roll_out(model)
    stack = train_stack(model, {"stack.num_updates_per_batch": 4, "stack.micro_batch_size": 3})
    rows = stack._algorithm.rows([one])
    split = stack._split(rows, [one], filler=torch.tensor([len(rows)]))
    parts = [list(part.slices) for part in split]
    samples = [set(rows.sample_index[torch.cat(part)].tolist()) for part in parts]
    assert samples == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
    assert sorted(torch.cat([i for part in parts for i in part]).tolist()) == list(range(16))
    assert {len(index) for part in parts for index in part} == {3, 1}


def test_shuffled_parts_cover_all_samples_and_are_the_same_after_a_restart():
    model = tiny_model()
    one = roll_out(model)
    rows = train_stack(model)._algorithm.rows([one])

    def parts(seed: int, num_steps: int) -> list[set[int]]:
        overrides = {"stack.num_updates_per_batch": 2, "stack.shuffle_updates": True}
        stack = train_stack(model, overrides | {"seed": seed})
        stack._num_steps = num_steps
        split = stack._split(rows, [one], filler=torch.tensor([len(rows)]))
        return [set(rows.sample_index[torch.cat(list(part.slices))].tolist()) for part in split]

    drawn = [parts(seed, num_steps) for seed in range(3) for num_steps in range(4)]
    assert all(len(first) == 4 and first | second == set(range(8)) for first, second in drawn)
    assert all(sum(sample < 4 for sample in first) == 2 for first, _ in drawn)
    assert drawn == [parts(seed, num_steps) for seed in range(3) for num_steps in range(4)]
    assert len({frozenset(first) for first, _ in drawn}) > 6


def test_dropped_groups_leave_fewer_rows_but_the_same_training():
    valid = torch.tensor([False] * 4 + [True] * 4)
    model = tiny_model()
    rollout = sample(model, rollout_request(), forward_batch_size=4)
    one = scored(rollout, valid=valid)
    stack = train_stack(model)
    (part,) = stack._split(stack._algorithm.rows([one]), [one], filler=torch.tensor([16]))
    assert part.num_rows == 8
    (stats,) = stack.update([one])
    assert stats.skipped is None


def test_large_gradients_are_clipped_and_reported_unclipped():
    model = tiny_model()
    randomize_adapter(model)
    stack = train_stack(model, {"stack.max_grad_norm": 1e-6})
    seen: list[float] = []
    step = stack._optimizer.step

    def spy(*args: Any, **kwargs: Any) -> Any:
        parameters = adapter_parameters(model.network).values()
        grads = [p.grad for p in parameters if p.grad is not None]
        seen.append(float(torch.stack([g.norm() for g in grads]).norm()))
        return step(*args, **kwargs)

    stack._optimizer.step = spy  # type: ignore[method-assign]
    (stats,) = stack.update([roll_out(model)])
    assert stats.metrics["grad_norm"] > 1e-4
    assert seen == [pytest.approx(1e-6, rel=1e-2)]


# --- skipped steps --------------------------------------------------------------------------------


def spoil(one: ScoredRollout, value: float) -> ScoredRollout:
    advantages = one.advantages.clone()
    advantages[0] = value
    return replace(one, advantages=advantages)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_a_non_finite_gradient_skips_the_step_and_changes_nothing(value, caplog):
    model = tiny_model()
    stack = train_stack(model)
    stack.update([roll_out(model)])
    before = state(stack)
    (stats,) = stack.update([spoil(roll_out(model), value)])
    assert stats.skipped is not None
    assert "lora_B" in stats.skipped or "the norm" in stats.skipped
    assert stack.weight_version == 1
    assert same_bits(state(stack), before)
    assert "optimizer step skipped: non-finite gradient" in caplog.text
    (stats,) = stack.update([roll_out(model)])
    assert stats.skipped is None


def test_the_message_names_the_parameters_whose_gradient_is_not_finite():
    model = tiny_model()
    stack = train_stack(model)
    name, bad = next(iter(adapter_parameters(model.network).items()))
    bad.register_hook(lambda gradient: torch.full_like(gradient, float("nan")))
    (stats,) = stack.update([roll_out(model)])
    assert stats.skipped == f"non-finite gradient (norm nan) in 1 of 8 tensors: {name}"


def test_without_any_advantage_the_step_is_skipped_and_moments_do_not_decay():
    model = tiny_model()
    stack = train_stack(model)
    stack.update([roll_out(model)])
    before = state(stack)
    one = roll_out(model)
    (stats,) = stack.update([replace(one, advantages=torch.zeros(8))])
    assert stats.skipped == "zero gradient: equal rewards in every group, or the aim is reached"
    assert same_bits(state(stack), before)
    assert stack.weight_version == 1


def test_only_the_update_without_signal_is_skipped():
    model = tiny_model()
    one = roll_out(model)
    advantages = one.advantages.clone()
    advantages[:4] = 0
    stack = train_stack(model, {"stack.num_updates_per_batch": 2})
    first, second = stack.update([replace(one, advantages=advantages)])
    assert first.skipped is not None
    assert second.skipped is None
    assert stack.weight_version == 1


# --- dtypes and what is trained -------------------------------------------------------------------


def test_bf16_storage_keeps_the_trained_weights_and_moments_in_float32():
    model = tiny_model(frozen_dtype=torch.bfloat16, compute_dtype=torch.bfloat16)
    stack = train_stack(model)
    stack.update([roll_out(model)])
    adapter = adapter_parameters(model.network)
    assert {p.dtype for p in adapter.values()} == {torch.float32}
    base = {p.dtype for n, p in model.network.named_parameters() if n not in adapter}
    assert base == {torch.bfloat16}
    assert {moment.dtype for moment in moment_tensors(stack._optimizer)} == {torch.float32}


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
    tensors, optimizer = stack.state_tensors(adapter_only=True), stack.optimizer_state()
    offload(stack)
    uses = {
        "update": lambda: stack.update([one]),
        "load": lambda: stack.load_state(tensors, {}, optimizer),
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
    there = stack.state_tensors(adapter_only=False), stack.optimizer_state()
    read = stack.read_weights(adapter=True, with_probe=True)
    offload(stack)
    parked = stack.state_tensors(adapter_only=False), stack.optimizer_state()
    read_parked = stack.read_weights(adapter=True, with_probe=True)
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

    monkeypatch.setattr(stack._optimizer, "step", fails)
    with pytest.raises(RuntimeError, match="halfway"):
        stack.update([roll_out(model)])
    assert stack.weight_version == 1, "what was read before must not pass for current"


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("lora_rank", "adapter_only"), [(2, True), (2, False), (None, False)])
def test_a_restored_stack_goes_on_exactly_where_it_stood(lora_rank, adapter_only):
    stack = trained({"stack.scheduler.type": "cosine"}, lora_rank=lora_rank)
    saved = stack.state_tensors(adapter_only), {}, stack.optimizer_state()
    resumed = train_stack(tiny_model(lora_rank=lora_rank), {"stack.scheduler.type": "cosine"})
    resumed.load_state(*saved)
    assert resumed.weight_version == stack.weight_version == 2
    for each in (stack, resumed):
        each.update([roll_out(each.model, key="next")])  # type: ignore[arg-type]
    assert same_bits(state(stack), state(resumed))


def test_a_restored_stack_parks_its_new_weights():
    stack = trained({})
    saved = stack.state_tensors(adapter_only=True), {}, stack.optimizer_state()
    resumed = train_stack(tiny_model())
    offload(resumed)
    onload(resumed)
    resumed.load_state(*saved)
    offload(resumed)
    onload(resumed)
    assert same_bits(state(resumed), state(stack))


@pytest.mark.parametrize("misfit", ["missing", "unexpected", "shape", "empty"])
def test_weights_that_do_not_fit_are_refused_with_nothing_written(misfit):
    stack = trained({})
    tensors, optimizer = stack.state_tensors(adapter_only=True), stack.optimizer_state()
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
        other.load_state(tensors, {}, optimizer)
    assert same_bits(state(other), before)
    assert other.weight_version == 0


def test_an_optimizer_state_that_does_not_fit_is_refused_with_nothing_written():
    stack = trained({})
    tensors, optimizer = stack.state_tensors(adapter_only=True), stack.optimizer_state()
    moments = optimizer["optimizer"]["state"]
    moments[0], moments[1] = moments[1], moments[0]
    other = train_stack(tiny_model())
    before = state(other)
    with pytest.raises(ModelError, match="optimizer state does not fit"):
        other.load_state(tensors, {}, optimizer)
    assert same_bits(state(other), before)


def test_settings_of_the_optimizer_come_from_the_recipe_not_from_the_checkpoint():
    stack = trained({"stack.optimizer.weight_decay": 0.0})
    changed = {"stack.optimizer.weight_decay": 0.25, "stack.optimizer.adam_beta1": 0.5}
    resumed = train_stack(tiny_model(), changed)
    resumed.load_state(stack.state_tensors(adapter_only=True), {}, stack.optimizer_state())
    (group,) = resumed._optimizer.param_groups
    assert (group["weight_decay"], group["betas"][0]) == (0.25, 0.5)


def test_a_saved_stack_can_still_be_parked(tmp_path):
    stack = trained({}, num_windows=1)
    torch.save(stack.optimizer_state(), tmp_path / "optimizer.pt")
    save_file(stack.state_tensors(adapter_only=False), tmp_path / "weights.safetensors")
    before = state(stack)
    offload(stack)
    onload(stack)
    assert same_bits(state(stack), before)


def test_what_is_saved_is_a_copy():
    stack = trained({}, num_windows=1)
    saved = stack.state_tensors(adapter_only=True)
    copies = {name: value.clone() for name, value in saved.items()}
    stack.update([roll_out(stack.model)])  # type: ignore[arg-type]
    assert same_bits(saved, copies)


# --- losses that cannot be trained on -------------------------------------------------------------


class _Broken:
    """FlowGRPO whose loss is changed on its way out."""

    def __init__(self, stack: TrainStack, change: Any) -> None:
        self._inner, self._change = stack._algorithm, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def loss(self, policy: Any, rows: Any) -> Any:
        losses = self._inner.loss(policy, rows)
        return replace(losses, loss=self._change(losses.loss))


def broken(change: Any) -> TrainStack:
    stack = train_stack(tiny_model())
    stack._algorithm = _Broken(stack, change)  # type: ignore[assignment]
    return stack


def test_an_average_instead_of_a_term_per_row_is_told():
    stack = broken(lambda loss: loss.mean())
    with pytest.raises(TrainingError, match=r"loss of shape \(\) for 4 rows.*one term per row"):
        stack.update([roll_out(stack.model)])  # type: ignore[arg-type]


def test_a_run_of_windows_without_a_finite_gradient_ends_and_a_good_one_starts_the_count_anew():
    factors = iter([math.nan, math.nan, 1.0, math.nan, math.nan, math.nan])
    current = [1.0]
    stack = broken(lambda loss: loss * current[0])
    one = roll_out(stack.model)  # type: ignore[arg-type]
    for number, factor in enumerate(factors):
        current[0] = factor
        if number == 5:
            with pytest.raises(TrainingError, match="3 windows in a row: non-finite gradient"):
                stack.update([one])
        else:
            stack.update([one])
    assert stack.weight_version == 1
