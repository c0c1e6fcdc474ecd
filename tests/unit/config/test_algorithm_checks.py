"""Keys that would be ignored are errors."""

from __future__ import annotations

from typing import Any

import pytest
from builders import run_config

from unirl.config import catalog
from unirl.config.checks import problems
from unirl.config.schema import AlgorithmConfig

COUNT = {"sampling.samples_per_prompt": 4}


def found(overrides: dict[str, Any], key: str) -> str:
    """The problem told of that key; empty when there is none."""
    return " ".join(p.message for p in problems(run_config(overrides)) if p.key == key)


@pytest.mark.parametrize("name", list(catalog.ALGORITHMS))
def test_every_option_of_an_algorithm_is_a_key(name: str) -> None:
    assert set(catalog.ALGORITHMS[name].capabilities.options) <= set(AlgorithmConfig.model_fields)


def test_every_key_is_read_by_some_algorithm() -> None:
    read = {o for entry in catalog.ALGORITHMS.values() for o in entry.capabilities.options}
    assert AlgorithmConfig.model_fields.keys() - {"path", "args", "adv_clip_max"} == read


@pytest.mark.parametrize(
    ("path", "option", "value"),
    [
        ("flow_grpo", "mix_beta", 0.5),
        ("diffusion_nft", "clip_range", 1e-2),
        ("draft", "old_log_prob", "rollout"),
        ("flow_grpo", "args", {"a": 1}),
    ],
)
def test_an_option_the_algorithm_does_not_read_is_told(path: str, option: str, value: Any) -> None:
    key = f"algorithm.{option}"
    overrides = {"algorithm": {"path": path, option: value}}
    message = found(overrides, key)
    assert path in message
    assert "Remove the key" in message


def test_an_option_at_its_default_and_one_that_is_read_are_fine() -> None:
    assert not found({"algorithm.mix_beta": 1.0}, "algorithm.mix_beta")
    assert not found({"algorithm.clip_range": 0.3}, "algorithm.clip_range")


@pytest.mark.parametrize(("best_of", "is_told"), [(1, True), (2, False), (4, False), (5, True)])
def test_best_of_needs_as_many_samples(best_of: int, is_told: bool) -> None:
    assert bool(found({"adv_best_of": best_of}, "adv_best_of")) == is_told


def test_siblings_by_start_need_shared_starts() -> None:
    assert "init_same_noise" in found({"adv_group": "start"}, "adv_group")
    shared = {"adv_group": "start", "sampling.samples_per_start": 2}
    assert not found(shared, "adv_group")


@pytest.mark.parametrize("block", ["sampling", "eval_sampling"])
def test_a_shift_on_top_of_the_models_schedule_is_refused(block: str) -> None:
    key = f"{block}.shift"
    assert f"{block}.sigma_schedule=linear" in found({key: 3.0}, key)
    assert not found({key: 3.0, f"{block}.sigma_schedule": "linear"}, key)


@pytest.mark.parametrize("block", ["sampling", "eval_sampling"])
def test_a_schedule_that_the_network_was_not_trained_on_is_refused(block: str) -> None:
    key = f"{block}.sigma_schedule"
    assert f"{key}=model" in found({key: "linear", "model.family": "sdxl"}, key)
    assert not found({key: "linear", "model.family": "sd3"}, key)


@pytest.mark.parametrize("path", ["diffusion_dpo", "draft", "refl", "distillation"])
def test_keys_of_advantages_that_nobody_reads_are_told(path: str) -> None:
    overrides = {"algorithm": {"path": path}, "adv_epsilon": 1e-4, "adv_use_global_std": True}
    assert "Set adv_use_global_std=false" in found(overrides, "adv_use_global_std")
    assert path in found(overrides, "adv_epsilon")
    clipped = {"algorithm": {"path": path, "adv_clip_max": 2.0}}
    assert "Set algorithm.adv_clip_max=5.0" in found(clipped, "algorithm.adv_clip_max")
    assert not found({"algorithm.adv_clip_max": 2.0}, "algorithm.adv_clip_max")
    assert not found({**overrides, "algorithm": {"path": "flow_grpo"}}, "adv_epsilon")


def test_a_missing_adapter_is_told_with_the_ways_that_this_algorithm_has() -> None:
    none = {"stack.lora": None}
    dpo = found({**none, "algorithm": {"path": "diffusion_dpo"}}, "algorithm.reference")
    assert "stack.lora={} or algorithm.reference=ema." in dpo
    nft = {"path": "diffusion_nft", "kl_coefficient": 0.1}
    assert "algorithm.kl_coefficient=0" in found(
        {**none, "algorithm": nft}, "algorithm.kl_coefficient"
    )
