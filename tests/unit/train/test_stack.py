"""The update loop: what a step changes, when it is skipped, and which losses it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import (
    policy,
    randomize_adapter,
    same_bits,
    tiny_model,
    train_stack,
    weights,
)
from stacks import roll_out, state, trained
from torch import Tensor

from unirl.algorithms.flow_grpo import RatioRows
from unirl.core.errors import TrainingError
from unirl.core.types import ScoredRollout
from unirl.models.lora import adapter_parameters
from unirl.models.tiny import TinyModel
from unirl.train.stack import TrainStack

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


def test_large_gradients_are_clipped_and_reported_unclipped():
    model = tiny_model()
    randomize_adapter(model)
    stack = train_stack(model, {"stack.max_grad_norm": 1e-6})
    seen: list[float] = []
    step = stack.weights.optimizer.step

    def spy(*args: Any, **kwargs: Any) -> Any:
        parameters = adapter_parameters(model.network).values()
        grads = [p.grad for p in parameters if p.grad is not None]
        seen.append(float(torch.stack([g.norm() for g in grads]).norm()))
        return step(*args, **kwargs)

    stack.weights.optimizer.step = spy  # type: ignore[method-assign]
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
