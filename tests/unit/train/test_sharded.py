"""A network in shards over two ranks computes, parks, reads and saves as a whole one does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from builders import (
    CPU,
    host_arena,
    offload,
    onload,
    randomize_adapter,
    rollout_request,
    run_config,
    same_bits,
    sample,
    sampling_params,
    tiny_model,
    weights,
)
from rank_pool import RankPool
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from unirl.algorithms.making import make_algorithm
from unirl.cli.check import checked
from unirl.config.resources import resolve_path
from unirl.config.schema import BackendConfig
from unirl.core.components import Moved
from unirl.core.types import Rewards, ScoredRollout, UpdateStats
from unirl.distributed.group import joined
from unirl.distributed.ranks import OneRank, Ranks
from unirl.distributed.sharding import own_part, own_prompts, sample_places
from unirl.models.blocks import find_blocks
from unirl.models.tiny import TinyModel
from unirl.models.trainable import load_settings
from unirl.runtime.training_model import build_model, build_training_model
from unirl.train.backend import TrainBackend, WholeBackend, write_share
from unirl.train.sharded import ShardedBackend, make_mesh
from unirl.train.stack import TrainStack
from unirl.weight_sync.payload import WeightPayload

NUM_PROMPTS, GROUP = 2, 4
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.1, -0.1])


@dataclass(frozen=True)
class Trained:
    """A model, how it lies on the ranks, and the stack that trains it."""

    model: TinyModel
    backend: TrainBackend
    stack: TrainStack
    ranks: Ranks

    def scored(self, advantages: Tensor = ADVANTAGES) -> ScoredRollout:
        """This rank's part of a rollout of two prompts, with the advantages of all samples."""
        request = rollout_request(num_prompts=NUM_PROMPTS, samples_per_prompt=GROUP)
        rollout = sample(self.model, own_part(request, self.ranks), forward_batch_size=2)
        valid = torch.ones(NUM_PROMPTS * GROUP, dtype=torch.bool)
        return ScoredRollout(
            rollout.request,
            rollout.trajectory,
            rollout.conditioning,
            rollout.negative_conditioning,
            sample_places(own_prompts(NUM_PROMPTS, self.ranks), GROUP),
            Rewards(advantages, {"only": advantages}, valid),
            advantages,
            valid,
        )

    def whole_weights(self) -> dict[str, Tensor]:
        named = self.model.network.named_parameters()
        return {name: self.backend.whole(parameter) for name, parameter in named}


def trained(
    ranks: Ranks, *, lora_rank: int | None = 2, backend: BackendConfig | None = None
) -> Trained:
    config = run_config({"stack.max_grad_norm": 1e-3, "stack.optimizer.adam_epsilon": 1e-2})
    model = tiny_model(lora_rank=lora_rank)
    randomize_adapter(model)
    layout: TrainBackend = WholeBackend()
    if ranks.world_size > 1:
        settings = backend or BackendConfig()
        mesh = make_mesh(settings, ranks.world_size, CPU)
        layout = ShardedBackend(
            model.network, find_blocks(model.network, ["Block"]), mesh, settings
        )
    stack = TrainStack(
        model,
        layout,
        make_algorithm(config.algorithm),
        config.stack,
        10,
        sampling_params(),
        config.seed,
        CPU,
        ranks,
        host_arena(),
    )
    return Trained(model, layout, stack, ranks)


# --- steps ------------------------------------------------------------------------------------


def step(advantages: Tensor, lora_rank: int | None) -> tuple[UpdateStats, dict[str, Tensor]]:
    """One optimizer step in shards, and the whole weights after it."""
    with joined() as ranks:
        one = trained(ranks, lora_rank=lora_rank)
        [stats] = one.stack.update([one.scored(advantages)])
        return stats, one.whole_weights()


@pytest.mark.parametrize("lora_rank", [2, None], ids=["adapter", "all weights"])
def test_a_step_in_shards_is_the_step_of_one_device(pool: RankPool, lora_rank: int | None) -> None:
    one = trained(OneRank(), lora_rank=lora_rank)
    start = weights(one.model)
    [expected] = one.stack.update([one.scored()])
    after = weights(one.model)
    moved = max(float((after[name] - start[name]).abs().max()) for name in start)
    for stats, whole in pool.run(2, step, ADVANTAGES, lora_rank):
        assert stats.metrics == pytest.approx(dict(expected.metrics), rel=1e-3, abs=1e-6)
        for name, tensor in after.items():
            assert torch.allclose(whole[name], tensor, rtol=0, atol=1e-4 * moved), name


def test_a_step_without_any_gradient_is_skipped_by_all(pool: RankPool) -> None:
    start = weights(trained(OneRank()).model)
    for stats, whole in pool.run(2, step, torch.zeros(NUM_PROMPTS * GROUP), 2):
        assert stats.skipped is not None
        assert "zero gradient" in stats.skipped
        assert same_bits(whole, start)


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all_with_names(
    pool: RankPool,
) -> None:
    start = weights(trained(OneRank()).model)
    advantages = ADVANTAGES.clone()
    advantages[GROUP] = float("inf")  # a sample of rank 1
    results = pool.run(2, step, advantages, 2)
    for stats, whole in results:
        assert stats.skipped is not None
        assert "non-finite gradient" in stats.skipped
        assert "in 8 of 8 tensors: blocks.0.attn.proj.lora_A" in stats.skipped
        assert same_bits(whole, start)
    assert results[0][0].skipped == results[1][0].skipped


class Collectives(TorchDispatchMode):
    """Counts the gathers and reductions that run while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"allgather": 0, "reduce_scatter": 0, "allreduce": 0}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func.namespace == "c10d":
            [kind] = [name for name in self.counts if name in func.__name__]
            self.counts[kind] += 1
        return func(*args, **(kwargs or {}))


def num_reductions(defer_reduce: bool) -> int:
    """Reduce-scatters in a step of two micro-batches on each rank."""
    with joined() as ranks:
        settings = BackendConfig(defer_reduce=defer_reduce)
        one = trained(ranks, lora_rank=None, backend=settings)
        scored = one.scored()
        assert len(scored) * scored.request.num_sde_steps == 8  # rows, in micro-batches of 4
        with Collectives() as during:
            one.stack.update([scored])
        return during.counts["reduce_scatter"]


def test_gradients_are_reduced_once_a_unit_and_step(pool: RankPool) -> None:
    units = 2  # the block, and the rest
    assert pool.run(2, num_reductions, True) == [units] * 2
    assert pool.run(2, num_reductions, False) == [2 * units] * 2


# --- where the weights are ------------------------------------------------------------------------


def park_and_return() -> tuple[Moved, bool, bool, bool]:
    """After a step: bytes moved; whether objects, bits, and later sampling are the same."""
    with joined() as ranks:
        one = trained(ranks)
        one.stack.update([one.scored()])
        objects = dict(one.model.network.named_parameters())
        before, images = one.whole_weights(), one.scored().trajectory.final_latents
        moved = offload(one.stack)
        onload(one.stack)
        after = dict(one.model.network.named_parameters())
        same_objects = all(after[name] is parameter for name, parameter in objects.items())
        assert all(isinstance(parameter, DTensor) for parameter in after.values())
        same_images = torch.equal(one.scored().trajectory.final_latents, images)
        return moved, same_objects, same_bits(one.whole_weights(), before), same_images


def test_parking_moves_the_own_shards_and_keeps_every_object(pool: RankPool) -> None:
    one = trained(OneRank())
    one.stack.update([one.scored()])
    whole = offload(one.stack).num_bytes
    results = pool.run(2, park_and_return)
    for moved, *same in results:
        assert same == [True, True, True]
        assert 0.4 * whole < moved.num_bytes < 0.6 * whole
    buffers = sum(buffer.nbytes for buffer in one.model.network.buffers())  # whole on each rank
    assert sum(moved.num_bytes for moved, *_ in results) >= whole
    assert sum(moved.num_bytes for moved, *_ in results) < 1.1 * whole + buffers


def park_after_a_failed_forward() -> tuple[bool, bool]:
    """Whether the failure left weights gathered, and whether parking did."""
    with joined() as ranks:
        one = trained(ranks)
        [block] = find_blocks(one.model.network, ["FSDPBlock"])

        def fail(*_: Any) -> None:
            raise ValueError("out of memory")

        handle = block.fc2.register_forward_pre_hook(fail)  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="out of memory"):
            one.scored()
        handle.remove()
        left = _is_gathered(one.model)
        offload(one.stack)
        still = _is_gathered(one.model)
        onload(one.stack)
        one.scored()
        return left, still


def _is_gathered(model: TinyModel) -> bool:
    return not all(isinstance(parameter, DTensor) for parameter in model.network.parameters())


def test_parking_frees_what_a_failed_forward_left_gathered(pool: RankPool) -> None:
    assert pool.run(2, park_after_a_failed_forward) == [(True, False)] * 2


def gathered_sampling() -> tuple[int, int, bool, bool]:
    """Gathers of a rollout inside and outside `gathered`; whether the samples and objects agree."""
    with joined() as ranks:
        one = trained(ranks)
        objects = list(one.model.network.parameters())
        with Collectives() as outside:
            plain = one.scored().trajectory.final_latents
        with one.stack.sampling(unshard=True):
            assert _is_gathered(one.model)
            with Collectives() as inside:
                kept = one.scored().trajectory.final_latents
        after = list(one.model.network.parameters())
        same = all(a is b for a, b in zip(objects, after, strict=True))
        gathers = [mode.counts["allgather"] for mode in (inside, outside)]
        return gathers[0], gathers[1], torch.equal(plain, kept), same


def test_weights_kept_gathered_give_the_same_samples_without_gathers(pool: RankPool) -> None:
    for inside, outside, same_samples, same_objects in pool.run(2, gathered_sampling):
        assert inside == 0
        assert outside > 0
        assert same_samples
        assert same_objects


# --- reading and writing --------------------------------------------------------------------------


def read_weights(adapter: bool) -> WeightPayload:
    with joined() as ranks:
        one = trained(ranks)
        return one.stack.weights.read_weights(adapter=adapter, with_probe=True)


@pytest.mark.parametrize("adapter", [True, False])
def test_every_rank_reads_the_same_whole_weights(pool: RankPool, adapter: bool) -> None:
    expected = trained(OneRank()).stack.weights.read_weights(adapter=adapter, with_probe=True)
    assert expected.probe is not None
    for payload in pool.run(2, read_weights, adapter):
        assert payload.version == expected.version
        assert same_bits(payload.tensors, expected.tensors)
        assert payload.probe is not None
        # Not bit for bit: how a small product rounds depends on where gathered weights lie.
        torch.testing.assert_close(payload.probe.velocity, expected.probe.velocity)
        torch.testing.assert_close(payload.probe.base_velocity, expected.probe.base_velocity)


def write_everything(values: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[int]]:
    """Whole weights after each was overwritten, and how many numbers of each lie here."""
    with joined() as ranks:
        one = trained(ranks)
        named = dict(one.model.network.named_parameters())
        for name, parameter in named.items():
            write_share(one.backend, parameter, values[name])
        assert dict(one.model.network.named_parameters()) == named
        local = [one.backend.local(parameter).numel() for parameter in named.values()]
        return one.whole_weights(), local


def test_whole_tensors_are_written_and_read_back_also_where_they_do_not_divide(
    pool: RankPool,
) -> None:
    model = tiny_model()
    values = {name: torch.randn_like(tensor) for name, tensor in weights(model).items()}
    assert any(len(tensor) % 2 for tensor in values.values())
    results = pool.run(2, write_everything, values)
    for whole, _ in results:
        assert same_bits(whole, values)
    locals_of_ranks = zip(*(local for _, local in results), strict=True)
    assert [sum(local) for local in locals_of_ranks] == [t.numel() for t in values.values()]


# --- a start without values -----------------------------------------------------------------------


def build(words: Sequence[str]) -> tuple[dict[str, Tensor], int, set[str]]:
    """Whole weights of the training model, numbers of it that lie here, and their dtypes."""
    config = checked("quickstart", ["num_devices=2", *words], None)
    with joined() as ranks:
        model, backend = build_training_model(config, CPU, ranks, with_encoders=False)
        named = dict(model.network.named_parameters())
        whole = {name: backend.whole(parameter) for name, parameter in named.items()}
        local = sum(backend.local(parameter).numel() for parameter in named.values())
        dtypes = {str(p.dtype) for p in named.values() if p.requires_grad}
        assert model.network.positions.isfinite().all()  # type: ignore[operator]
        return whole, local, dtypes


@pytest.mark.parametrize(
    "words",
    [(), ("stack.lora=null",), ("model.precision=bf16", "model.frozen_dtype=bf16")],
    ids=["adapter", "all weights", "bf16"],
)
def test_a_model_that_no_rank_ever_held_has_the_values_of_the_whole_one(
    pool: RankPool, words: tuple[str, ...]
) -> None:
    config = checked("quickstart", list(words), None)
    expected = weights(build_model(config, CPU, with_encoders=False))  # type: ignore[arg-type]
    for whole, local, dtypes in pool.run(2, build, words):
        assert same_bits(whole, expected)
        assert local < 0.6 * sum(tensor.numel() for tensor in expected.values())
        assert dtypes == {"torch.float32"}


def test_a_skeleton_has_buffers_but_no_parameters() -> None:
    config = checked("quickstart", [], None)
    path = resolve_path(config.model.path)
    model = TinyModel.load_skeleton(path, load_settings(config, with_encoders=False))
    assert all(parameter.is_meta for parameter in model.network.parameters())
    assert not any(buffer.is_meta for buffer in model.network.buffers())
    assert model.network_files() == {"": [path]}


def mesh_shape(settings: BackendConfig) -> tuple[tuple[int, ...], tuple[str, ...]]:
    with joined():
        mesh = make_mesh(settings, 4, CPU)
        return tuple(mesh.shape), tuple(mesh.mesh_dim_names or ())


def test_a_hybrid_mesh_is_replicas_of_shard_groups(pool: RankPool) -> None:
    hybrid = BackendConfig(mesh="hybrid", shard_size=2)
    assert set(pool.run(4, mesh_shape, hybrid)) == {((2, 2), ("replicate", "shard"))}
    assert set(pool.run(4, mesh_shape, BackendConfig())) == {((4,), ("shard",))}
