"""The doctor's numbers, and that nobody can tell from a run whether it looked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from builders import (
    policy,
    randomize_adapter,
    rollout_request,
    run_config,
    same_bits,
    sample,
    scored,
    tiny_model,
    train_stack,
    weights,
)
from torch import Tensor

from unirl.algorithms.base import Algorithm
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.algorithms.making import make_algorithm
from unirl.algorithms.transitions import TransitionRows, transition_rows
from unirl.core.types import PromptRecord, ScoredRollout
from unirl.models.tiny import TinyModel
from unirl.train.examination import Measured, measure

PATHS = ("flow_grpo", "grpo_guard", "flow_dppo", "flash_grpo", "diffusion_nft", "awm", "draft")


def rolled_out(model: TinyModel, path: str = "flow_grpo", **changes: Any) -> ScoredRollout:
    """Two groups of four, with what the algorithm trains on."""
    request = rollout_request(num_prompts=2, **changes)
    if path == "draft":
        request = replace(request, kept_steps=(3, 4))
    return scored(sample(model, request))


def brightness(images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
    return images.flatten(1).mean(dim=1)


def algorithm_of(path: str, **keys: Any) -> Algorithm[Any, Any]:
    overrides = {f"algorithm.{name}": value for name, value in keys.items()}
    config = run_config({"algorithm.path": path, **overrides})
    return make_algorithm(config.algorithm, brightness)


def look(
    model: TinyModel, one: ScoredRollout, path: str = "flow_grpo", size: int = 4, **keys: Any
) -> Measured:
    stack = train_stack(model, {"algorithm.path": path})
    return measure(stack.policy(), algorithm_of(path, **keys), [one], size)


def gradients(model: TinyModel) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.network.named_parameters() if p.grad is not None}


def norm_of(model: TinyModel, loss: Tensor) -> float:
    trained = [p for p in model.network.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, trained)
    return float(torch.stack([grad.norm() for grad in grads]).norm())


# --- it is a look only --------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_an_update_after_a_look_gives_the_same_bits(path: str) -> None:
    trained = []
    for with_look in (True, False):
        model = tiny_model()
        randomize_adapter(model)
        overrides = {"algorithm.path": path, "stack.num_updates_per_batch": 2}
        stack = train_stack(model, overrides)
        stack._algorithm = algorithm_of(path)  # with a reward to differentiate
        for number in range(2):  # after a first update, Adam and shadows have something to lose
            one = rolled_out(model, path, key=f"rollout-{number}")
            if with_look:
                random_state = torch.get_rng_state()
                measure(stack.policy(), algorithm_of(path), [one], 4)
                assert torch.equal(torch.get_rng_state(), random_state)
                assert gradients(model) == {}
            metrics = [stats.metrics for stats in stack.update([one], nullcontext)]
        trained.append((weights(model), metrics))
    (looked, told), (alone, told_alone) = trained
    assert same_bits(looked, alone)
    assert told == told_alone


def test_a_look_that_fails_leaves_no_gradients() -> None:
    model = tiny_model()
    one = rolled_out(model)

    class Fails(FlowGRPO):
        calls = 0

        def loss(self, *args: Any) -> Any:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("half way")
            return super().loss(*args)

    with pytest.raises(RuntimeError, match="half way"):
        measure(policy(model), Fails(run_config().algorithm, brightness), [one], 4)
    assert gradients(model) == {}
    assert not any(p._backward_hooks for p in model.network.parameters())


# --- gradients ----------------------------------------------------------------------------------


def test_gradients_of_a_step_are_those_of_its_rows_mean_loss() -> None:
    model = tiny_model()
    randomize_adapter(model)
    one = rolled_out(model, sde_steps=(0, 2))
    algorithm = algorithm_of("flow_grpo")
    measured = look(model, one, size=8)
    rows, _ = algorithm.anchor(policy(model), transition_rows([one]), [torch.arange(16)])
    for place, level in enumerate(measured.levels):
        index = torch.arange(8) + 8 * place  # rows are ordered (step, sample)
        losses = algorithm.loss(policy(model), rows.select(index))
        assert level.step == (0, 2)[place]
        assert level.num_rows == 8
        assert level.gradient_norm == pytest.approx(norm_of(model, losses.loss.mean()), rel=1e-4)
    whole = algorithm.loss(policy(model), rows)
    assert measured.gradients.norm == pytest.approx(norm_of(model, whole.loss.mean()), rel=1e-4)


def test_a_network_that_is_asked_twice_in_a_loss_counts_once() -> None:
    model = tiny_model()
    randomize_adapter(model)
    one = rolled_out(model, "draft")
    algorithm = algorithm_of("draft", last_steps=2)
    measured = look(model, one, "draft", size=8, last_steps=2)
    rows, _ = algorithm.anchor(policy(model), algorithm.rows([one]), [torch.arange(8)])
    expected = norm_of(model, algorithm.loss(policy(model), rows).loss.mean())
    (level,) = measured.levels
    assert level.gradient_norm == pytest.approx(expected, rel=1e-4)
    assert measured.gradients.norm == pytest.approx(expected, rel=1e-4)


def test_the_rms_is_that_of_elements_with_a_gradient() -> None:
    model = tiny_model()  # B is 0, so A gets no gradient
    measured = look(model, rolled_out(model))
    b_elements = sum(p.numel() for n, p in model.network.named_parameters() if ".lora_B." in n)
    gradient = measured.gradients
    assert gradient.num_elements == b_elements
    assert gradient.rms == pytest.approx(gradient.norm / math.sqrt(b_elements))
    num_a = sum(".lora_A." in n for n, _ in model.network.named_parameters())
    assert (gradient.silent, gradient.num_waiting) == ((), num_a)


def test_a_trained_tensor_that_nothing_depends_on_is_silent() -> None:
    model = tiny_model()
    randomize_adapter(model)
    model.network.spare = torch.nn.Linear(2, 2)
    gradient = look(model, rolled_out(model)).gradients
    assert (gradient.silent, gradient.num_waiting) == (("spare.bias", "spare.weight"), 0)


# --- log-probs ----------------------------------------------------------------------------------


def test_differences_to_the_engine_are_told_by_step() -> None:
    model = tiny_model()
    one = rolled_out(model, sde_steps=(0, 2))
    off = one.trajectory.log_probs.clone()
    off[:, 1] += 1e-2
    off[3, 1] += 1e-2
    one = replace(one, trajectory=replace(one.trajectory, log_probs=off))
    first, second = (level.replay for level in look(model, one, size=8).levels)
    assert first is not None
    assert second is not None
    assert first.max_difference < 1e-5
    assert second.max_difference == pytest.approx(2e-2, rel=1e-3)
    assert second.mean_difference == pytest.approx(9e-2 / 8, rel=1e-3)


def test_batches_that_compute_differently_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    one = rolled_out(model)
    assert all(level.replay.max_alone_difference < 1e-5 for level in look(model, one).levels)
    shape_dependent(model, monkeypatch)
    assert all(level.replay.max_alone_difference > 1e-4 for level in look(model, one).levels)


def shape_dependent(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the velocity depends on how many rows are asked about at once."""
    exact = model.velocity

    def velocity(latents: Tensor, *rest: Any) -> Tensor:
        return exact(latents, *rest) * (1 + 1e-2 * len(latents))

    monkeypatch.setattr(model, "velocity", velocity)


def test_the_ratio_is_looked_at_in_full_precision() -> None:
    model = tiny_model()
    one = rolled_out(model)
    nudged = replace(one.trajectory, log_probs=one.trajectory.log_probs + 1e-5)
    one = replace(one, trajectory=nudged)
    assert look(model, one, old_log_prob="replay").max_log_ratio == 0
    found = look(model, one, old_log_prob="rollout").max_log_ratio
    assert found == pytest.approx(1e-5, rel=0.1)


# --- which rows ---------------------------------------------------------------------------------


def test_rows_are_spread_over_the_samples_that_are_trained() -> None:
    model = tiny_model()
    one = rolled_out(model)
    asked: list[list[int]] = []

    class Listens(FlowGRPO):
        def loss(self, policy: Any, rows: Any) -> Any:
            asked.append(rows.sample_index.tolist())
            return super().loss(policy, rows)

    algorithm = Listens(run_config().algorithm, brightness)
    untrained = one.trained.clone()
    untrained[:2] = False
    one = replace(one, trained=untrained)
    measure(policy(model), algorithm, [one], 3)
    assert asked == [[2, 4, 6], [2, 4, 6], [2]], "the last one for the layers"


def test_rollouts_of_a_window_are_looked_at_together() -> None:
    model = tiny_model()
    window = [rolled_out(model, key=f"rollout-{number}") for number in range(2)]
    measured = measure(policy(model), algorithm_of("flow_grpo"), window, 64)
    assert [level.num_rows for level in measured.levels] == [16, 16]
    assert measured.sampled.num_samples == 16
    assert measured.sampled.samples_by_step == {0: 16, 2: 16}


def test_renoised_rows_are_told_apart_by_tenths_of_their_level() -> None:
    model = tiny_model()
    one = rolled_out(model, sde_steps=(), eta=0.0)
    measured = look(model, one, "awm", size=64)
    levels = [level.sigma for level in measured.levels]
    assert levels == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert sum(level.num_rows for level in measured.levels) == 16
    assert {(level.step, level.replay) for level in measured.levels} == {(None, None)}


def test_a_window_without_rows_to_train_on_gives_no_levels() -> None:
    model = tiny_model()
    one = scored(sample(model, rollout_request(sde_steps=())), rewards=torch.ones(8))
    measured = look(model, one, "diffusion_dpo")
    assert measured.levels == ()
    assert measured.sampled.num_equal_groups == measured.sampled.num_groups == 2


def test_groups_dropped_by_failed_scorers_are_not_counted_as_equal() -> None:
    model = tiny_model()
    valid = torch.tensor([False] * 4 + [True] * 4)
    one = scored(sample(model, rollout_request()), valid=valid)
    sampled = look(model, one).sampled
    assert (sampled.num_groups, sampled.num_equal_groups) == (1, 0)


@dataclass(frozen=True)
class OwnRows:
    """Rows as a user may write them."""

    inner: TransitionRows

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def sample_index(self) -> Tensor:
        return self.inner.sample_index

    def select(self, index: Tensor) -> OwnRows:
        return OwnRows(self.inner.select(index))


def test_rows_of_an_unknown_kind_are_looked_at_all_the_same() -> None:
    class Own(FlowGRPO):
        def rows(self, scored: Any) -> Any:
            return OwnRows(super().rows(scored))

        def anchor(self, policy: Any, rows: Any, slices: Any) -> Any:
            return super().anchor(policy, rows.inner, slices)

    model = tiny_model()
    algorithm = Own(run_config().algorithm, brightness)
    (level,) = measure(policy(model), algorithm, [rolled_out(model)], 64).levels
    assert (level.step, level.sigma, level.replay, level.num_rows) == (None, None, None, 16)
    assert level.gradient_norm > 0
