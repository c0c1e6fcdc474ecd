"""From the train stack to the engine, and the proof that it arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
    sample,
    scored,
    tiny_model,
    train_stack,
)
from peft.tuners.lora import LoraLayer
from torch import Tensor

from unirl.core.errors import ResidencyError, WeightSyncError
from unirl.models.lora import adapter_parameters
from unirl.rollout.replica import ReplicaEngine
from unirl.train.stack import TrainStack
from unirl.weight_sync.base import SharedWeights
from unirl.weight_sync.full import LocalFullSync
from unirl.weight_sync.lora import LocalLoraSync
from unirl.weight_sync.payload import LoadReport, Probe, WeightPayload, checksum

Load = Callable[[ReplicaEngine, WeightPayload], LoadReport]


class CountingSource:
    """The train stack, counting reads."""

    def __init__(self, stack: TrainStack) -> None:
        self._stack = stack
        self.num_reads = 0
        self.readable_while_parked = stack.weights.readable_while_parked

    @property
    def weight_version(self) -> int:
        return self._stack.weight_version

    def read_weights(self, *, adapter: bool, with_probe: bool) -> WeightPayload:
        self.num_reads += 1
        return self._stack.weights.read_weights(adapter=adapter, with_probe=with_probe)


class CountingTarget:
    """The engine, counting loads; `load` may do it wrongly."""

    def __init__(self, engine: ReplicaEngine, load: Load) -> None:
        self._engine = engine
        self._load = load
        self.num_loads = 0

    @property
    def weight_version(self) -> int | None:
        return self._engine.weight_version

    def load_weights(self, payload: WeightPayload) -> LoadReport:
        self.num_loads += 1
        return self._load(self._engine, payload)

    def answer(self, probe: Probe) -> Tensor:
        return self._engine.answer(probe)


class Pair:
    """A train stack and an engine with equal weights, and the sync between them."""

    def __init__(
        self,
        *,
        lora_rank: int | None = 2,
        load: Load = ReplicaEngine.load_weights,
        learning_rate: float = 1e-2,
        **model: Any,
    ) -> None:
        self.model = tiny_model(lora_rank=lora_rank, **model)
        self.stack = train_stack(self.model, {"stack.optimizer.learning_rate": learning_rate})
        rollout_model = tiny_model(lora_rank=lora_rank, **model)
        rollout_model.network.requires_grad_(False)
        self.engine = ReplicaEngine(rollout_model, 0, CPU, host_arena(), None)
        onload(self.engine)
        self.source, self.target = CountingSource(self.stack), CountingTarget(self.engine, load)

    def lora_sync(self, verify: bool = True) -> LocalLoraSync:
        return LocalLoraSync(self.source, self.target, verify)

    def full_sync(self, verify: bool = True) -> LocalFullSync:
        return LocalFullSync(self.source, self.target, verify)

    def train(self) -> None:
        rollout = sample(self.model, rollout_request(key=f"step-{self.stack.weight_version}"))
        (stats,) = self.stack.update([scored(rollout)])
        assert stats.skipped is None

    def engine_output(self) -> Tensor:
        request = rollout_request(weight_version=self.engine.weight_version)
        return self.engine.generate(request).trajectory.final_latents

    def trainer_output(self) -> Tensor:
        return sample(self.model, rollout_request()).trajectory.final_latents


# --- staged LoRA sync -----------------------------------------------------------------------------


def test_after_a_push_the_engine_samples_like_the_trainer_and_unlike_the_base():
    pair = Pair()
    base = pair.engine_output()
    pair.train()
    pair.lora_sync().sync()
    assert torch.equal(pair.engine_output(), pair.trainer_output())
    assert not torch.equal(pair.engine_output(), base)
    assert pair.engine.weight_version == pair.stack.weight_version == 1


def test_one_extract_serves_every_push_until_the_next_step():
    pair = Pair()
    sync = pair.lora_sync()
    assert not sync.has_staged_adapter()
    for _ in range(3):
        sync.sync()
    assert sync.has_staged_adapter()
    assert (pair.source.num_reads, pair.target.num_loads) == (1, 1)
    pair.train()
    assert not sync.has_staged_adapter()
    sync.sync()
    assert (pair.source.num_reads, pair.target.num_loads) == (2, 2)


def test_a_push_of_a_version_the_engine_holds_loads_nothing():
    pair = Pair()
    sync = pair.lora_sync()
    sync.sync()
    sync.extract()
    sync.push()
    assert (pair.source.num_reads, pair.target.num_loads) == (2, 1)
    assert sync.published_version == 0


def test_an_engine_that_lost_its_adapter_gets_it_again_from_the_cache():
    pair = Pair()
    sync = pair.lora_sync()
    pair.train()
    sync.sync()
    pair.engine._weight_version = None
    randomize_adapter(pair.engine._model)  # type: ignore[arg-type]
    sync.sync()
    assert pair.source.num_reads == 1
    assert torch.equal(pair.engine_output(), pair.trainer_output())


def test_a_parked_trainer_is_read_from_the_host_and_stays_parked():
    pair = Pair()
    sync = pair.lora_sync()
    pair.train()
    expected = pair.trainer_output()
    offload(pair.stack)
    sync.sync()
    assert torch.equal(pair.engine_output(), expected)
    assert not any(part.is_resident for part in pair.stack.parts)
    assert sync.published_version == 1


def test_push_into_a_sleeping_engine_is_refused_and_publishes_nothing():
    pair = Pair()
    offload(pair.engine)
    sync = pair.lora_sync()
    sync.extract()
    with pytest.raises(ResidencyError, match="while parked"):
        sync.push()
    assert sync.published_version is None


def test_push_without_an_extract_is_refused():
    with pytest.raises(WeightSyncError, match="call extract"):
        Pair().lora_sync().push()


def test_what_was_extracted_before_a_step_is_not_pushed_after_it():
    pair = Pair()
    sync = pair.lora_sync()
    pair.train()
    sync.extract()
    pair.train()
    with pytest.raises(WeightSyncError, match="of version 2, but version 1 was extracted"):
        sync.push()
    assert pair.engine.weight_version is None


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen_dtype", [torch.float32, torch.bfloat16])
def test_verification_passes_for_a_good_push_in_every_precision(compute_dtype, frozen_dtype):
    stored = torch.float32 if compute_dtype is torch.float32 else frozen_dtype
    pair = Pair(compute_dtype=compute_dtype, frozen_dtype=stored)
    for _ in range(2):
        pair.train()
        sync = pair.lora_sync()
        sync.sync()
    assert pair.engine.weight_version == sync.published_version == 2


# --- full sync ------------------------------------------------------------------------------------


def test_full_sync_brings_every_weight():
    pair = Pair(lora_rank=None)
    sync = pair.full_sync()
    sync.sync()
    assert pair.target.num_loads == 1, "the first sync proves what the engine holds"
    pair.train()
    sync.sync()
    assert torch.equal(pair.engine_output(), pair.trainer_output())
    assert sync.published_version == pair.engine.weight_version == 1
    sync.sync()
    assert pair.target.num_loads == 2


def test_shared_weights_are_always_published():
    pair = Pair()
    sync = SharedWeights(pair.stack)
    sync.sync()
    pair.train()
    assert sync.published_version == 1


# --- pushes that went wrong -----------------------------------------------------------------------


def scrambles_a_tensor(engine: ReplicaEngine, payload: WeightPayload) -> LoadReport:
    engine.load_weights(payload)
    held = adapter_parameters(engine._model.network)
    next(iter(held.values())).data.add_(1e-3)
    return LoadReport(len(held), checksum(held))


def binds_a_part(engine: ReplicaEngine, payload: WeightPayload) -> LoadReport:
    report = engine.load_weights(payload)
    return replace(report, num_bound=report.num_bound - 1)


def binds_nothing(engine: ReplicaEngine, payload: WeightPayload) -> LoadReport:
    return LoadReport(0, checksum({}))


def forgets_a_tensor(engine: ReplicaEngine, payload: WeightPayload) -> LoadReport:
    tensors = dict(payload.tensors)
    tensors.popitem()
    return engine.load_weights(replace(payload, tensors=tensors))


def renames_a_tensor(engine: ReplicaEngine, payload: WeightPayload) -> LoadReport:
    tensors = dict(payload.tensors)
    name, tensor = tensors.popitem()
    return engine.load_weights(replace(payload, tensors=tensors | {f"base.{name}": tensor}))


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (scrambles_a_tensor, "weights differ from the pushed ones"),
        (binds_a_part, "bound 7 of 8"),
        (binds_nothing, "bound 0 of 8"),
        (forgets_a_tensor, "bound 7 of 8 tensors, missing"),
        (renames_a_tensor, "missing .* unexpected"),
    ],
)
def test_a_push_that_did_not_arrive_is_an_error_and_is_not_published(load, message):
    pair = Pair(load=load)
    pair.train()
    sync = pair.lora_sync()
    with pytest.raises(WeightSyncError, match=message):
        sync.sync()
    assert sync.published_version is None


def test_tensors_that_do_not_fit_leave_the_engine_as_it_was():
    pair = Pair(load=renames_a_tensor)
    before = pair.engine_output()
    pair.train()
    with pytest.raises(WeightSyncError):
        pair.lora_sync().sync()
    assert pair.engine.weight_version is None
    assert torch.equal(pair.engine_output(), before)


def loads_but_does_not_use(engine: ReplicaEngine, payload: WeightPayload) -> LoadReport:
    """Holds the right bytes, but its layers run without the adapter."""
    report = engine.load_weights(payload)
    for module in engine._model.network.modules():
        if isinstance(module, LoraLayer):
            module._disable_adapters = True
    return report


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_an_engine_that_ignores_a_trained_adapter_is_caught_by_the_probe(compute_dtype):
    pair = Pair(load=loads_but_does_not_use, compute_dtype=compute_dtype)
    randomize_adapter(pair.model)
    pair.train()
    with pytest.raises(WeightSyncError, match="does not sample from the pushed weights"):
        pair.lora_sync().sync()


def test_an_engine_that_ignores_the_adapter_is_caught_after_the_first_step():
    pair = Pair(load=loads_but_does_not_use, learning_rate=3e-4)
    pair.train()
    with pytest.raises(WeightSyncError, match="the adapter is loaded but not used"):
        pair.lora_sync().sync()


def test_an_engine_with_another_base_is_caught_by_the_probe():
    pair = Pair()
    for name, parameter in pair.engine._model.network.named_parameters():
        if ".lora_" not in name:
            parameter.data = parameter.data * 1.05
    with pytest.raises(WeightSyncError, match="does not sample from the pushed weights"):
        pair.lora_sync().sync()


def test_a_probe_that_gives_nan_is_an_error():
    pair = Pair()
    pair.engine._model.network.head.bias.data.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(WeightSyncError, match="does not sample from the pushed weights"):
        pair.lora_sync().sync()


def test_without_verification_nothing_is_proved_and_no_probe_is_made():
    pair = Pair(load=binds_nothing)
    pair.lora_sync(verify=False).sync()
    assert pair.source.num_reads == 1


# --- payloads -------------------------------------------------------------------------------------


def test_the_checksum_sees_names_and_values_and_not_the_order():
    a, b = torch.arange(3.0), torch.ones(2)
    assert checksum({"a": a, "b": b}) == checksum({"b": b, "a": a})
    assert checksum({"a": a, "b": b}) != checksum({"a": a, "c": b})
    assert checksum({"a": a}) != checksum({"a": a + 1e-7})


def test_the_checksum_leaves_weights_movable():
    weight = torch.ones(4)
    checksum({"weight": weight})
    assert weight.untyped_storage().resizable()


def test_payloads_hold_copies_on_the_host_and_the_same_probe_each_time():
    pair = Pair()
    first, second = (
        pair.stack.weights.read_weights(adapter=True, with_probe=True) for _ in range(2)
    )
    assert first.tensors.keys() == adapter_parameters(pair.model.network).keys()
    assert first.num_bytes == sum(t.numel() * 4 for t in first.tensors.values())
    assert first.probe is not None
    assert second.probe is not None
    assert torch.equal(first.probe.velocity, second.probe.velocity)
    full = pair.stack.weights.read_weights(adapter=False, with_probe=False)
    assert full.tensors.keys() == dict(pair.model.network.named_parameters()).keys()
    assert full.probe is None
