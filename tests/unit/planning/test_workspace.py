"""The estimate against the same work done on real tensors, and against counting by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import policy, rollout_request, run_config, sample, scored, tiny_model
from families.sd3 import build_tiny_sd3
from torch import nn

from unirl.algorithms.making import make_algorithm
from unirl.cli.compose import compose
from unirl.config.resources import resolve_path
from unirl.config.schema import RunConfig
from unirl.models.base import DiffusionModel
from unirl.models.sd3 import StableDiffusion3Model
from unirl.models.tiny import TinyModel
from unirl.models.trainable import load_settings, make_trainable
from unirl.planning.blueprint import Blueprint, blueprint_model
from unirl.planning.gpu_autocast import gpu_autocast
from unirl.planning.live_bytes import LiveBytes
from unirl.planning.weightless import Weightless, WeightlessMode, make_weightless
from unirl.planning.workspace import Workspace, estimate_workspace, measure_workspace
from unirl.train.optimizer import make_optimizer

FULL = "stack.lora=null"
SMALL = (
    *("batch_size=2", "sampling.samples_per_prompt=2", "stack.micro_batch_size=3"),
    *("stack.num_updates_per_batch=1", "stack.shuffle_updates=false"),
)


@pytest.fixture(scope="module")
def sd3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_sd3(tmp_path_factory.mktemp("sd3") / "sd3")


@pytest.fixture
def sd3(sd3_folder: Path) -> Callable[..., RunConfig]:
    def recipe(*keys: str) -> RunConfig:
        sizes = ("sampling.height=64", "sampling.width=64", "model.max_sequence_length=16")
        return compose(
            "diffusion/sd3/sd3_trainside",
            [f"model.path={sd3_folder}", *SMALL, *sizes, "stack.lora.rank=2", *keys],
        )

    return recipe


def tiny(*keys: str) -> RunConfig:
    return compose("diffusion/tiny/tiny_replica_lora", [*SMALL, *keys])


FAMILIES: dict[str, type[DiffusionModel]] = {"tiny": TinyModel, "sd3": StableDiffusion3Model}


def really_measured(config: RunConfig) -> Workspace:
    """The estimate's own work on weights that were loaded."""
    blueprint = blueprint_model(config, with_encoders=True)
    model = FAMILIES[config.model.family].load(
        resolve_path(config.model.path), load_settings(config, with_encoders=True)
    )
    make_trainable(config, model)
    with gpu_autocast():
        return measure_workspace(config, model, blueprint.block_classes)


def estimated(config: RunConfig) -> Workspace:
    return estimate_workspace(config, blueprint_model(config, with_encoders=True))


@pytest.mark.parametrize(
    "name",
    [
        *("tiny_grpo_guard", "tiny_flash_grpo", "tiny_tempflow_grpo", "tiny_diffusion_nft"),
        *("tiny_awm", "tiny_diffusion_dpo", "tiny_draft", "tiny_refl", "tiny_distillation"),
    ],
)
def test_the_estimate_of_every_kind_of_loss_is_what_a_real_one_holds(name: str) -> None:
    small = ("eval_interval=0", "batch_size=2", "sampling.samples_per_prompt=4")
    config = compose(f"diffusion/tiny/{name}", [*small, "stack.micro_batch_size=3"])
    assert estimated(config) == really_measured(config)


@pytest.mark.parametrize(
    "keys",
    [
        ("stack.lora.rank=4",),
        (FULL,),
        ("stack.lora.rank=4", "model.precision=bf16", "model.frozen_dtype=bf16"),
        (FULL, "model.precision=bf16"),
        ("sampling.guidance_scale=2", "algorithm.kl_coefficient=0.1"),
    ],
    ids=["lora", "full", "lora-bf16", "full-bf16", "guidance-kl"],
)
def test_tiny_estimate_is_what_a_real_run_holds(keys: tuple[str, ...]) -> None:
    config = tiny("eval_interval=0", *keys)
    assert estimated(config) == really_measured(config)


@pytest.mark.parametrize(
    "keys",
    [
        (),
        (FULL,),
        ("model.precision=fp32", "model.frozen_dtype=fp32"),
        ("sampling.guidance_scale=4",),
    ],
    ids=["lora-bf16", "full-bf16", "lora-fp32", "guidance"],
)
def test_sd3_estimate_is_what_a_real_run_holds(
    sd3: Callable[..., RunConfig], keys: tuple[str, ...]
) -> None:
    config = sd3("eval_interval=0", *keys)
    estimate, real = estimated(config), really_measured(config)
    # A plan has no tokenizer: what the real one makes of the prompts is some bytes more.
    assert abs(estimate.encode - real.encode) <= 0.01 * real.encode
    assert replace(estimate, encode=real.encode) == real


@pytest.mark.parametrize("lora_rank", [2, None], ids=["lora", "full"])
@pytest.mark.parametrize("keys", [{}, {"sampling.guidance_scale": 2.0}], ids=["plain", "guided"])
def test_training_peak_is_that_of_the_algorithm_on_a_real_rollout(
    lora_rank: int | None, keys: dict[str, Any]
) -> None:
    config = run_config({"stack.micro_batch_size": 16, "sampling.sde_steps.num_steps": 1, **keys})
    model = tiny_model(lora_rank=lora_rank)
    guidance = config.sampling.guidance_scale
    request = rollout_request(num_prompts=4, num_steps=5, sde_steps=(1,), guidance_scale=guidance)
    algorithm = make_algorithm(config.algorithm)
    rows = algorithm.rows([scored(sample(model, request))])
    with torch.no_grad():
        rows, _ = algorithm.anchor(policy(model), rows, [torch.arange(16)])
    assert len(rows) == 16
    trained = [p for p in model.network.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in trained if p.grad is not None]
    with LiveBytes([*model.network.parameters(), *model.network.buffers(), *gradients]) as live:
        algorithm.loss(policy(model), rows.select(torch.arange(16))).loss.sum().backward()
    estimate = estimate_workspace(config, on_meta(tiny_model(lora_rank=lora_rank)))
    assert estimate.train == pytest.approx(live.peak, rel=0.01)


def test_sampling_peak_is_that_of_the_engine() -> None:
    config = run_config({"eval_interval": 0})
    model = tiny_model()
    request = rollout_request(num_prompts=4, num_steps=5, sde_steps=(1, 2))
    with LiveBytes([*model.network.parameters(), *model.network.buffers()]) as live:
        rollout = sample(model, request)
    estimate = estimate_workspace(config, on_meta(tiny_model()))
    assert len(rollout.images) == 16
    # Its noise is made on the host, which is the same memory here, and its result grows meanwhile.
    assert live.peak == pytest.approx(estimate.rollout + estimate.rollout_kept, rel=0.1)


def on_meta(model: TinyModel) -> Blueprint:
    model.network.to("meta")
    return Blueprint(model, "a test", ("Block",))


def test_checkpointing_swaps_the_two_training_peaks_and_saves_memory() -> None:
    config = tiny("eval_interval=0")
    plain = estimated(config)
    backend = config.backend.model_copy(update={"activation_checkpointing": True})
    checkpointed = estimated(config.model_copy(update={"backend": backend}))
    assert plain.train == checkpointed.train_other_checkpointing
    assert checkpointed.train == plain.train_other_checkpointing
    assert checkpointed.train < plain.train


def test_sampling_sees_the_batches_the_engine_makes() -> None:
    four = estimated(tiny("eval_interval=0"))  # 2 prompts x 2 samples
    two = estimated(tiny("eval_interval=0", "rollout.forward_batch_size=2"))
    assert two.rollout < four.rollout
    assert two.rollout_kept == four.rollout_kept
    guided = estimated(
        tiny("eval_interval=0", "rollout.forward_batch_size=2", "sampling.guidance_scale=2")
    )
    # The network sees as many rows; latents and the two halves are what is more or less.
    assert guided.rollout == pytest.approx(four.rollout, rel=0.05)


def test_an_evaluation_counts_where_it_is_larger() -> None:
    training = estimated(tiny("eval_interval=0"))
    evaluated = estimated(tiny("eval_interval=1", "eval_chunk_prompts=8"))  # x 4 samples
    assert evaluated.rollout > training.rollout
    assert evaluated.train == training.train


def test_bytes_that_need_no_run_are_counted_by_hand() -> None:
    config = tiny(
        "eval_interval=0",
        "accumulate_rollouts=2",
        "save_interval=0",
        "stack.lora.rank=4",
        "sampling.num_inference_steps=8",
        "sampling.sde_steps={strategy: random, range: [0, 0.5], num_steps: 3}",
    )
    workspace = estimated(config)
    network = blueprint_model(config, with_encoders=True).model.network
    trained = sum(p.numel() for name, p in network.named_parameters() if ".lora_" in name)
    assert workspace.grads == 4 * trained > 0
    latents, samples, steps = 4 * 3 * 16 * 32, 4, 3
    per_row = 2 * latents + 3 * 4 + 4 * 8  # both latents, and some numbers
    assert workspace.rows == pytest.approx(2 * samples * steps * per_row, rel=1e-3)
    tokens, log_probs, numbers = 8 * 10 * samples, 4 * steps, 8 * steps
    assert workspace.rollout_kept == (
        samples * ((2 * steps + 1) * latents + log_probs + numbers) + tokens
    )


def test_the_optimizer_step_makes_one_intermediate_per_trained_value() -> None:
    config = run_config().stack.optimizer
    parameters = [nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(999))]
    optimizer = make_optimizer(parameters, config)
    optimizer.param_groups[0]["foreach"] = True  # as AdamW chooses itself on a GPU
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    with LiveBytes([*parameters, *moments]) as live:
        optimizer.step()
    trained_bytes = sum(parameter.nbytes for parameter in parameters)
    assert live.peak == pytest.approx(trained_bytes, abs=64)  # and some scalars


def test_an_estimate_leaves_the_blueprint_as_it_was() -> None:
    config = tiny("eval_interval=0")
    blueprint = blueprint_model(config, with_encoders=True)
    first = estimate_workspace(config, blueprint)
    assert all(p.is_meta and p.grad is None for p in blueprint.model.network.parameters())
    assert estimate_workspace(config, blueprint) == first


@pytest.mark.parametrize(
    "release",
    [
        "sd3.5-medium",
        "flux.2-dev",
        pytest.param("flux.1-dev", marks=pytest.mark.slow),
        pytest.param("qwen-image", marks=pytest.mark.slow),
        pytest.param("wan2.1-t2v-14b", marks=pytest.mark.slow),
    ],
)
def test_published_networks_run_without_memory(release: str) -> None:
    workspace = estimated(published(release))
    assert workspace.train > 1.5 * workspace.train_other_checkpointing
    assert min(workspace.encode, workspace.rollout, workspace.decode) > 0


def test_what_an_unknown_mask_picks_is_counted_as_all_of_it() -> None:
    with WeightlessMode():
        tokens = torch.zeros(2, 5, 7)
        mask = tokens[..., 0] > 0
        assert tokens[0][mask[0]].shape == (5, 7)
        assert tokens[mask].shape == (10, 7)
        assert tokens[:, mask[1]].shape == (2, 5, 7)


def test_whole_numbers_and_masks_made_of_none_but_such_are_known() -> None:
    with WeightlessMode():
        is_slot = torch.arange(6) >= 4
        spread = is_slot.repeat_interleave(torch.where(is_slot, 3, 1))
        assert spread.tolist() == [False] * 4 + [True] * 6
        assert int(spread.sum()) == 6
        assert torch.zeros(2, 10, 3)[:, spread].shape == (2, 6, 3)
        numbers = torch.full_like(spread, -1, dtype=torch.long)
        last = numbers[8:]
        numbers[torch.tensor([1, 9])] = torch.tensor([5, 7])
        assert numbers.unique().tolist() == [-1, 5, 7]
        assert last.tolist() == [-1, 7]


def test_values_are_forgotten_in_all_views_when_something_unknown_is_written() -> None:
    with WeightlessMode():
        numbers = torch.arange(4)
        view = numbers[1:]
        numbers[0] = torch.zeros(()).long()
        assert view.tolist() == [0, 0, 0]
        assert len(view.unique()) == 3  # as many as it could be


def test_large_masks_and_random_numbers_are_not_known() -> None:
    with WeightlessMode():
        mask = torch.zeros(2**11, dtype=torch.bool).expand(2**10, -1).contiguous()
        assert len(mask.nonzero()) == 2**21
        assert torch.randint(5, 9, (3,)).tolist() == [0, 0, 0]
        assert torch.empty(3, dtype=torch.long).tolist() == [0, 0, 0]


def test_attention_never_holds_a_length_by_length_matrix() -> None:
    length, heads, width = 2**16, 24, 64
    with WeightlessMode():
        query = torch.zeros(1, heads, length, width, dtype=torch.bfloat16, requires_grad=True)
        with LiveBytes([query]) as live:
            attended = torch.nn.functional.scaled_dot_product_attention(query, query, query)
            saved = live.now
            attended.sum().backward()
    logsumexp = 4 * heads * length
    assert saved == query.nbytes + logsumexp
    assert live.peak < 10 * query.nbytes < heads * length * length


def published(release: str, *keys: str) -> RunConfig:
    config = compose(
        "diffusion/sd3/sd3_trainside",
        ["model.path=.", f"model.release={release}", "eval_interval=0", *SMALL, *keys],
    )
    return config.model_copy(update={"model": config.model.model_copy(update={"path": ""})})


# --- the tools ----------------------------------------------------------------------------------


def test_bytes_live_until_the_last_view_and_the_last_saved_tensor() -> None:
    weight = torch.ones(256, requires_grad=True)  # 1 KiB
    with LiveBytes([weight]) as live:
        alias = weight.view(16, 16)
        assert live.now == 0
        doubled = alias * 2
        view = doubled[0]
        del doubled
        assert live.now == 1024
        squared = (view * view).sum()  # saves the view for the backward
        del view
        assert live.now == 1024 + 4
        squared.backward()
        del squared
    assert live.peak >= 2 * 1024
    assert live.now == 1024  # the gradient


def test_weightless_tensors_have_the_shapes_and_ties_of_real_ones() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    make_weightless(module)
    assert module[1].weight is module[0].weight
    assert isinstance(module[0].weight, Weightless)
    with WeightlessMode():
        huge = torch.zeros(2**40, 4)  # 16 TiB
        out = module(huge)
        out.sum().backward()
        huge += 1
        assert huge[5:].shape == (2**40 - 5, 4)
        assert out.sum().item() == 0
    assert out.shape == (2**40, 4)
    gradient = module[0].weight.grad
    assert gradient is not None
    assert (gradient.shape, gradient.device.type) == ((4, 4), "cpu")


@pytest.mark.parametrize(
    ("function", "inside"),
    [
        (lambda x: torch.nn.functional.layer_norm(x, (4,)), torch.float32),
        (lambda x: x.softmax(-1), torch.float32),
        (lambda x: x**2, torch.float32),
        (lambda x: x @ x, torch.bfloat16),
        (lambda x: torch.nn.functional.silu(x), torch.bfloat16),
    ],
    ids=["layer_norm", "softmax", "pow", "matmul", "silu"],
)
def test_gpu_rules_of_autocast(function: Any, inside: torch.dtype) -> None:
    """The dtypes that torch.autocast("cuda") gives, by torch's page on its op lists."""
    x = torch.ones(4, 4, dtype=torch.bfloat16)
    with gpu_autocast(), torch.autocast("cpu", torch.bfloat16):
        assert function(x).dtype == inside
    with gpu_autocast():
        assert function(x).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.layer_norm(x, (4,)).dtype == torch.bfloat16
