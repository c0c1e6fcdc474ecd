"""What the doctor says: both sides of every sentence, on situations that were built for them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import (
    randomize_adapter,
    rollout_request,
    run_config,
    sample,
    scored,
    tiny_model,
    train_stack,
)
from torch import Tensor

from unirl.algorithms.grpo_guard import normalised_log_ratio
from unirl.algorithms.making import make_algorithm
from unirl.config.catalog import ALGORITHMS
from unirl.core.types import ScoredRollout
from unirl.models.tiny import TinyModel
from unirl.samplers.gaussian import Gaussian
from unirl.samplers.schedule import karras_sigmas, linear_sigmas, shifted
from unirl.train.examination import Gradients, Level, Measured, Replay, Sampled, measure
from unirl.train.findings.case import Case, Finding
from unirl.train.findings.judge import findings
from unirl.train.findings.learning import distance_across, gradient_by_step, gradient_size
from unirl.train.findings.sampling import static_shift

CLIP = 1e-3
ROLLOUT = {"algorithm.old_log_prob": "rollout"}


def examined(
    model: TinyModel, one: ScoredRollout, overrides: dict[str, Any] | None = None
) -> dict[str, Finding]:
    """By name."""
    overrides = {"algorithm.clip_range": CLIP, **(overrides or {})}
    config = run_config(overrides)
    algorithm = make_algorithm(config.algorithm)
    stack = train_stack(model, overrides)
    measured = measure(stack.policy(), algorithm, [one], config.stack.micro_batch_size)
    return {one.name: one for one in findings(config, algorithm.capabilities, measured)}


def rolled_out(model: TinyModel, rewards: Tensor | None = None, **changes: Any) -> ScoredRollout:
    return scored(sample(model, rollout_request(**changes)), rewards)


def with_log_probs_off_by(one: ScoredRollout, amount: float) -> ScoredRollout:
    trajectory = one.trajectory
    return replace(one, trajectory=replace(trajectory, log_probs=trajectory.log_probs + amount))


def test_all_is_fine_with_a_plain_run() -> None:
    model = tiny_model()
    found = examined(model, rolled_out(model))
    assert [one.name for one in found.values() if not one.is_fine] == []
    assert {one.key for one in found.values()} == {""}
    assert len(found) == 10


# --- is it computed right? ----------------------------------------------------------------------

BF16 = {"model.precision": "bf16"}


def test_rounding_of_a_layer_is_fine_and_a_broken_one_is_named() -> None:
    model = tiny_model(compute_dtype=torch.bfloat16)
    one = rolled_out(model)
    found = examined(model, one, BF16)
    assert found["layers"].is_fine
    assert len(found) == 11

    layer = model.network.get_submodule("blocks.0.fc2.base_layer")
    right = layer.forward
    wrong = lambda x: right(x).roll(1, -1) if torch.is_autocast_enabled("cpu") else right(x)  # noqa: E731
    layer.forward = wrong
    found = examined(model, one, BF16)
    assert not found["layers"].is_fine
    assert found["layers"].value.endswith("off float32, in blocks.0.fc2.base_layer")
    assert found["layers"].key == "model.precision=fp32"
    assert found["ratio"].is_fine, "which says nothing of it"


# --- is training what sampled? ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_updates", "said"), [(1, "it stays 1"), (2, "moves from the second of the 2 updates")]
)
def test_a_ratio_of_exactly_1_is_right(num_updates: int, said: str) -> None:
    model = tiny_model()
    one = with_log_probs_off_by(rolled_out(model), 0.3 * CLIP)
    ratio = examined(model, one, {"stack.num_updates_per_batch": num_updates})["ratio"]
    assert (ratio.value, ratio.is_fine) == ("exactly 1", True)
    assert said in ratio.sentence


@pytest.mark.parametrize(("share", "is_fine"), [(0.05, True), (0.2, False)])
def test_rounding_of_rollout_log_probs_may_take_a_tenth_of_the_clip_range(
    share: float, is_fine: bool
) -> None:
    model = tiny_model()
    one = with_log_probs_off_by(rolled_out(model), share * CLIP)
    found = examined(model, one, ROLLOUT)
    for name in ("ratio", "rollout against replay"):
        assert found[name].is_fine == is_fine
        assert found[name].key == ("" if is_fine else "algorithm.old_log_prob=replay")
        assert f"{share:.1%} of clip_range=0.001" in found[name].sentence


@pytest.mark.parametrize(("share", "is_fine"), [(0.5, True), (2.0, False)])
def test_with_replay_the_engine_may_differ_by_what_an_update_may_change(
    share: float, is_fine: bool
) -> None:
    model = tiny_model()
    one = with_log_probs_off_by(rolled_out(model), share * CLIP)
    found = examined(model, one)
    assert found["ratio"].value == "exactly 1"
    replay = found["rollout against replay"]
    assert replay.is_fine == is_fine
    assert replay.key == ("" if is_fine else "model.precision=fp32")


def test_the_step_that_differs_most_is_named() -> None:
    model = tiny_model()
    one = rolled_out(model, sde_steps=(0, 2))
    off = one.trajectory.log_probs + torch.tensor([0.0, 1e-2])
    one = replace(one, trajectory=replace(one.trajectory, log_probs=off))
    assert "1.0e-02 at step 2" in examined(model, one)["rollout against replay"].value


def test_a_network_that_computes_otherwise_with_gradients_is_not_fine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    one = rolled_out(model)
    exact = model.velocity
    monkeypatch.setattr(
        model, "velocity", lambda *asked: exact(*asked) * (1 + 0.01 * torch.is_grad_enabled())
    )
    ratio = examined(model, one)["ratio"]
    assert (ratio.is_fine, ratio.key) == (False, "model.precision=fp32")
    assert "with gradients and without" in ratio.sentence


@pytest.mark.parametrize("anchor", ["rollout", "replay"])
def test_what_the_batch_changes_matters_only_to_rollout_log_probs(
    anchor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    exact = model.velocity

    def velocity(latents: Tensor, *rest: Any) -> Tensor:
        return exact(latents, *rest) * (1 + 1e-3 * len(latents))

    monkeypatch.setattr(model, "velocity", velocity)
    found = examined(model, rolled_out(model), {"algorithm.old_log_prob": anchor})
    is_fine = anchor == "replay"
    assert found["ratio"].is_fine == is_fine
    assert found["batch shape"].is_fine == is_fine
    assert found["batch shape"].key == ("" if is_fine else "algorithm.old_log_prob=replay")
    assert "of clip_range=0.001" in found["batch shape"].sentence


@pytest.mark.parametrize("path", ["diffusion_nft", "diffusion_dpo"])
def test_algorithms_without_a_ratio_say_so(path: str) -> None:
    model = tiny_model()
    one = rolled_out(model, sde_steps=(), eta=0.0)
    found = examined(model, one, {"algorithm.path": path})
    assert found["ratio"] == Finding(
        "ratio", "none", True, f"{path} takes no ratio to an old policy, so nothing has to be 1."
    )
    assert found["stochastic steps"].value == "none"
    assert not {"rollout against replay", "batch shape", "clip range"} & found.keys()


def test_awm_has_a_ratio_but_no_steps() -> None:
    model = tiny_model()
    found = examined(model, rolled_out(model, sde_steps=(), eta=0.0), {"algorithm.path": "awm"})
    assert found["ratio"].value == "exactly 1"
    assert "clip range" not in found


# --- what was sampled ---------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [1.0, 3.0, 12.0])
def test_a_static_shift_is_recognised(shift: float) -> None:
    assert static_shift(shifted(linear_sigmas(10), shift)) == pytest.approx(shift)


def test_levels_that_no_shift_makes_have_none() -> None:
    assert static_shift(karras_sigmas(10, 0.03, 1.0)) is None


def test_levels_and_shift_are_shown() -> None:
    model = tiny_model()
    request = replace(rollout_request(num_steps=8), sigmas=shifted(linear_sigmas(8), 3.0))
    found = examined(model, scored(sample(model, request)))["noise levels"]
    assert found.value == "1, 0.9545, 0.9, ..., 0.3, 0"
    assert found.sentence.endswith("the model's own, as a static shift of 3 makes them.")


def test_the_window_tells_steps_and_samples() -> None:
    model = tiny_model()
    request = rollout_request(num_steps=5)
    request = replace(request, sde_steps=((1,),) * 6 + ((3,),) * 2)
    value = examined(model, scored(sample(model, request)))["stochastic steps"].value
    assert value == "1, 3 of 0 to 4, by 2 to 6 of 8 samples"
    value = examined(model, rolled_out(model, num_steps=7, sde_steps=(0, 1, 2, 5)))
    assert value["stochastic steps"].value == "0 to 2, 5 of 0 to 6, by 8 of 8 samples"


@pytest.mark.parametrize(("num_equal", "is_fine"), [(1, True), (2, False)])
def test_more_than_half_of_the_groups_equal_is_not_fine(num_equal: int, is_fine: bool) -> None:
    model = tiny_model()
    rewards = torch.arange(12.0)
    rewards[: 4 * num_equal] = 1.0
    one = rolled_out(model, rewards, num_prompts=3)
    found = examined(model, one)["equal rewards"]
    assert found.value == f"{num_equal} of 3 groups"
    assert found.is_fine == is_fine
    assert ("sampling.samples_per_prompt" in found.key) == (not is_fine)


# --- what is learned from it --------------------------------------------------------------------


def test_equal_rewards_everywhere_are_named_as_the_reason_of_no_gradient() -> None:
    model = tiny_model()
    gradient = examined(model, rolled_out(model, torch.ones(8)))["gradient"]
    assert (gradient.value, gradient.is_fine, gradient.key) == ("0", False, "reward.scorers")
    assert "all rewards of every group are equal" in gradient.sentence


def test_a_loss_that_nothing_trained_changes_is_not_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    one = rolled_out(model)
    exact = model.velocity
    cut = [p for p in model.network.parameters() if p.requires_grad]
    monkeypatch.setattr(
        model, "velocity", lambda *asked: exact(*asked).detach() + 0 * sum(p.sum() for p in cut)
    )
    gradient = examined(model, one)["gradient"]
    assert (gradient.is_fine, gradient.key) == (False, "stack.lora.target_modules")


def test_no_row_to_train_on_is_not_fine() -> None:
    model = tiny_model()
    one = rolled_out(model, torch.ones(8), sde_steps=(), eta=0.0)
    found = examined(model, one, {"algorithm.path": "diffusion_dpo"})
    assert found["gradient"].value == "none"
    assert not found["gradient"].is_fine
    assert "ratio" not in found


def test_gradients_must_stand_above_adams_epsilon() -> None:
    model = tiny_model()
    one = rolled_out(model)
    assert examined(model, one)["gradient"].is_fine
    small = examined(model, one, {"stack.optimizer.adam_epsilon": 1.0})["gradient"]
    assert not small.is_fine
    key, _, value = small.key.partition("=")
    assert key == "stack.optimizer.adam_epsilon"
    assert examined(model, one, {key: float(value)})["gradient"].is_fine


def test_the_clipped_gradient_is_what_adam_gets() -> None:
    model = tiny_model()
    one = rolled_out(model)
    overrides = {"stack.max_grad_norm": 1e-6, "stack.optimizer.adam_epsilon": 1e-7}
    assert not examined(model, one, overrides)["gradient"].is_fine
    assert examined(model, one, overrides | {"stack.max_grad_norm": 1.0})["gradient"].is_fine


def test_a_gradient_that_is_not_finite_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    one = rolled_out(model)
    exact = model.velocity
    monkeypatch.setattr(model, "velocity", lambda *asked: exact(*asked) * math.nan)
    gradient = examined(model, one)["gradient"]
    assert (gradient.value, gradient.is_fine) == ("nan", False)
    assert gradient.key == "model.precision=fp32"


def test_matrices_a_of_a_new_adapter_wait_for_b() -> None:
    model = tiny_model()
    found = examined(model, rolled_out(model))["tensors without gradient"]
    assert found.is_fine
    assert "matrices A of the adapter" in found.sentence
    randomize_adapter(model)
    found = examined(model, rolled_out(model))["tensors without gradient"]
    assert found.sentence == "Everything that is trained gets a gradient."


@pytest.mark.parametrize("lora", [True, False])
def test_parts_of_an_adapter_without_gradient_are_named(lora: bool) -> None:
    model = tiny_model()
    model.network.spare = torch.nn.Linear(2, 2)
    overrides = {} if lora else {"stack.lora": None}
    found = examined(model, rolled_out(model), overrides)["tensors without gradient"]
    assert found.value == "2: spare.bias, spare.weight"
    assert found.is_fine == (not lora)
    assert found.key == ("stack.lora.target_modules" if lora else "")


def test_steps_that_hardly_learn_are_told_with_algorithms_that_weigh_them() -> None:
    model = tiny_model()
    randomize_adapter(model)
    steps = tuple(range(1, 9))
    request = rollout_request(num_prompts=4, num_steps=10, sde_steps=steps)
    request = replace(request, sigmas=shifted(linear_sigmas(10), 12.0))
    one = scored(sample(model, request))
    overrides = {"sampling.num_inference_steps": 10, "stack.micro_batch_size": 16}
    plain = examined(model, one, overrides)["gradient by step"]
    assert not plain.is_fine
    assert plain.sentence.startswith("Step 1 hardly takes part")
    assert "flash_grpo or tempflow_grpo or grpo_guard" in plain.key
    assert "sampling.sde_steps.range" in plain.key
    weighed = examined(model, one, overrides | {"algorithm.path": "flash_grpo"})
    assert weighed["gradient by step"].is_fine


@pytest.mark.parametrize("path", ["flash_grpo", "tempflow_grpo", "grpo_guard"])
def test_an_algorithm_is_not_proposed_to_itself(path: str) -> None:
    (found,) = gradient_by_step(case_of(path, norms=(1e-3, 1.0)))
    assert not found.is_fine
    assert found.value == "1.0e-03 at step 0 to 1.0e+00 at step 1: 1e+03x"
    assert path not in found.key
    assert "sampling.sde_steps.range" in found.key


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("flow_grpo", "stack.lora.target_modules"),
        ("draft", "reward.scorers, algorithm.reward_cap"),
        ("distillation", "algorithm.teachers"),
    ],
)
def test_no_gradient_has_another_reason_for_another_kind_of_loss(path: str, key: str) -> None:
    (found,) = gradient_size(case_of(path, norms=(0.0,)))
    assert (found.value, found.is_fine, found.key) == ("0", False, key)


def case_of(path: str, norms: tuple[float, ...]) -> Case:
    """Steps with these gradient norms."""
    replay = Replay(0.5, 0.0, 0.0, 0.0)
    levels = tuple(Level(step, 0.5, 4, norm, replay) for step, norm in enumerate(norms))
    sampled = Sampled(linear_sigmas(4), {0: 8, 1: 8}, 8, 2, 0)
    gradients = Gradients(max(norms), 100, (), 0)
    return Case(
        run_config({"algorithm.path": path}),
        ALGORITHMS[path].capabilities,
        Measured(sampled, 0.0, 192, levels, 0.0, gradients, None),
    )


def test_noise_levels_of_other_losses_weigh_as_they_have_it() -> None:
    model = tiny_model()
    one = rolled_out(model, sde_steps=(), eta=0.0)
    assert examined(model, one, {"algorithm.path": "diffusion_nft"})["gradient by step"].is_fine


# --- how far an update may go -------------------------------------------------------------------


def test_a_shift_along_the_noise_changes_the_log_ratio_by_its_stds() -> None:
    old, noise, std = a_step(elements=4096)
    moved = Gaussian(old.mean + CLIP * std * noise, old.std)
    change = moved.log_prob(old.sample(noise)) - old.log_prob(old.sample(noise))
    assert change.mean().item() == pytest.approx(CLIP, rel=0.05)
    guarded = Gaussian(old.mean + CLIP / std * std * noise, old.std)
    change = normalised_log_ratio(guarded, old, old.sample(noise))
    assert change.mean().item() == pytest.approx(CLIP, rel=0.05)


@pytest.mark.parametrize(("elements", "second_order"), [(256, False), (16384, True)])
def test_a_shift_across_the_noise_reaches_the_clip_range_at_the_distance_given(
    elements: int, second_order: bool
) -> None:
    old, noise, std = a_step(elements)
    distance = distance_across(CLIP, elements)
    assert second_order == (distance < CLIP * math.sqrt(elements))
    direction = torch.ones(elements)
    direction[::2] = -1
    moved = Gaussian(old.mean + distance * std * direction, old.std)
    change = moved.log_prob(old.sample(noise)) - old.log_prob(old.sample(noise))
    assert change.square().mean().sqrt().item() == pytest.approx(CLIP, rel=0.5)


def a_step(elements: int) -> tuple[Gaussian, Tensor, float]:
    """64 equal steps, noise for each, and their std."""
    std = 0.4
    noise = torch.randn(64, elements, generator=torch.Generator().manual_seed(0))
    return Gaussian(torch.zeros(64, elements), torch.full((64, 1), std)), noise, std


def test_the_clip_range_is_told_in_stds_of_the_step() -> None:
    model = tiny_model()
    clip = examined(model, rolled_out(model, kernel="dance", eta=0.5))["clip range"]
    across = distance_across(CLIP, 3 * 8 * 8)
    assert clip.value == f"0.001 is 1.0e-03 std along the noise, {across:.1e} across it"
    assert f"a step's std is {0.5 * math.sqrt(0.2):.2g}." in clip.sentence


def test_a_normalised_ratio_is_clipped_in_units_of_its_own() -> None:
    model = tiny_model()
    one = rolled_out(model, kernel="dance", eta=0.5)
    clip = examined(model, one, {"algorithm.path": "grpo_guard"})["clip range"]
    assert clip.value == f"0.001 is {CLIP / (0.5 * math.sqrt(0.2)):.2g} std along the noise"


def test_a_divergence_is_the_same_in_every_direction() -> None:
    model = tiny_model()
    overrides = {"algorithm.path": "flow_dppo", "algorithm.kl_mask_threshold": 2e-4}
    found = examined(model, rolled_out(model), overrides)["kl mask threshold"]
    assert found.value == "0.0002 is 2.0e-02 std in any direction"
    old, _, std = a_step(64)
    moved = Gaussian(old.mean + 2e-2 * std, old.std)
    assert moved.kl(old)[0].item() == pytest.approx(2e-4, rel=1e-3)
