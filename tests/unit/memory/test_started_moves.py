"""Copies both ways at once: neither side is freed, read or used before its copies are complete."""

from __future__ import annotations

import pytest
import torch
from fake_device import FakeDevice, FakeDeviceError, InjectedError
from recording_roles import policy
from torch import Tensor

from unirl.core.components import FROZEN, Moved, Parking, RebuiltComponent, TensorComponent
from unirl.core.errors import ResidencyError
from unirl.memory.hostmem import GIB, HostArena, HostLimit
from unirl.memory.movers import RoleWeights
from unirl.memory.parts import TensorPart
from unirl.residency.planner import ResidencyPlanner
from unirl.residency.policy import Role
from unirl.residency.transition import MoveRule, Transition

NUM_BYTES = 400


def random(seed: int = 0) -> Tensor:
    return torch.randn(NUM_BYTES // 4, generator=torch.Generator().manual_seed(seed))


class Slab:
    """A trainer whose weights are written, and an engine that is asleep, on a fake device."""

    def __init__(self, capacity_bytes: int = 2 * NUM_BYTES, host_key: str = "") -> None:
        self.device = FakeDevice(capacity_bytes)
        self.host = HostArena(HostLimit(64 * GIB, "a test"), pin=False)
        self.num_writes = 0
        self.sampled = self.device.put("sampled", random(1))
        self.engine = self._part("rollout.weights", self.sampled, host_key, lambda: 0)
        self.engine.park(copy=True)
        self.trained = self.device.put("trained", random(0))
        self.trainer = self._part("train.weights", self.trained, host_key, lambda: self.num_writes)

    def _part(self, name, tensor, host_key, version) -> TensorPart:
        declared = TensorComponent(name, lambda: [tensor], version, host_key=host_key)
        (part,) = RoleWeights([declared], self.host, device_of=lambda _: self.device).parts
        assert isinstance(part, TensorPart)
        return part

    @property
    def in_flight(self) -> list[bool]:
        """Copies that are not complete; True is out."""
        return [copy.is_out for copy in self.device._pending]


def test_copies_of_both_ways_are_in_flight_at_once():
    slab = Slab()
    out = slab.trainer.start_park(copy=True)
    back = slab.engine.start_unpark()
    assert slab.in_flight == [True, False]
    slab.device.require_used(2 * NUM_BYTES)
    assert slab.trainer.is_resident
    assert not slab.engine.is_resident
    out.wait()
    assert slab.in_flight == []
    assert back.finish() == out.finish() == Moved(NUM_BYTES)
    slab.device.require_used(NUM_BYTES)
    assert torch.equal(slab.sampled, random(1))
    assert torch.equal(slab.trainer.read(slab.trained), random(0))


def test_memory_under_a_copy_cannot_be_freed():
    slab = Slab()
    slab.trainer.start_park(copy=True)
    slab.engine.start_unpark()
    for tensor in (slab.trained, slab.sampled):
        with pytest.raises(FakeDeviceError, match="was emptied under a copy"):
            slab.device.empty([tensor.untyped_storage()])


def test_a_host_copy_that_is_being_written_is_refused_to_its_other_readers():
    slab = Slab(host_key="network.base")
    assert torch.equal(slab.engine.read(slab.sampled), random(1))
    slab.trained.copy_(random(1))
    out = slab.trainer.start_park(copy=True)
    with pytest.raises(ResidencyError, match=r"host copy of rollout\.weights"):
        slab.engine.start_unpark()
    assert slab.in_flight == [True]
    out.finish()
    slab.engine.unpark()
    assert torch.equal(slab.sampled, random(1))


def test_moves_that_are_given_up_leave_both_where_they_were():
    slab = Slab()
    for _ in range(3):
        out, back = slab.trainer.start_park(copy=True), slab.engine.start_unpark()
        back.give_up()
        out.give_up()
        assert slab.in_flight == []
        slab.device.require_used(NUM_BYTES)
        assert slab.trainer.is_resident
        assert not slab.engine.is_resident
        assert torch.equal(slab.trained, random(0))
        assert torch.equal(slab.engine.read(slab.sampled), random(1))
    slab.trainer.park(copy=False)
    slab.engine.unpark()

    assert torch.equal(slab.sampled, random(1))


def test_what_there_is_nothing_to_copy_of_moves_at_the_end():
    dropped: list[str] = []
    rebuilt = RebuiltComponent(
        "graphs",
        lambda: dropped.append("drop") or 5,
        lambda: dropped.append("build") or 5,
        lambda: 5,
    )
    (part,) = RoleWeights([rebuilt], HostArena(HostLimit(GIB, "a test"), pin=False)).parts
    started = part.start_park(copy=False)
    started.wait()
    assert part.is_resident
    assert started.finish() == Moved(0, 5)
    started = part.start_unpark()
    started.give_up()
    assert dropped == ["drop"]
    assert part.start_unpark().finish() == Moved(5)
    assert dropped == ["drop", "build"]


@pytest.mark.parametrize("parking", [Parking.COPY, Parking.DROP])
def test_a_part_that_is_there_already_starts_nothing(parking):
    device = FakeDevice()
    tensor = device.put("tensor", random())
    declared = TensorComponent("part", lambda: [tensor], lambda: FROZEN, parking=parking)
    (part,) = RoleWeights(
        [declared], HostArena(HostLimit(GIB, "a test"), pin=False), device_of=lambda _: device
    ).parts
    device.operations_until_fault = 0
    assert part.start_unpark().finish() == Moved(0)


# --- through the planner --------------------------------------------------------------------------


class Run:
    """Steps and rollouts in turns, with room for both sides."""

    def __init__(self, overlap_bytes: int | None) -> None:
        self.slab = Slab()
        self.records: list[Transition] = []
        self.planner = ResidencyPlanner(
            policy(*Role),
            {Role.TRAIN: [self.slab.trainer], Role.ROLLOUT: [self.slab.engine]},
            self.records.append,
            lambda: None,
            overlap_bytes=overlap_bytes,
            announce=lambda transitions: None,
        )

    def step(self) -> None:
        self.slab.trained.mul_(1.5)
        self.slab.num_writes += 1


def test_handoffs_through_the_planner_lose_no_bit_and_no_byte():
    run, plain = Run(2 * NUM_BYTES), Run(None)
    for one in (run, plain):
        for _ in range(5):
            one.step()
            one.planner.enter(Role.ROLLOUT)
            assert torch.equal(one.slab.sampled, random(1))
            one.slab.device.require_idle()
            one.slab.device.require_used(NUM_BYTES)
            one.planner.enter(Role.TRAIN)
    assert torch.equal(run.slab.trained, plain.slab.trained)
    assert run.slab.device.copied_out_bytes == plain.slab.device.copied_out_bytes
    assert run.slab.device.copied_in_bytes == plain.slab.device.copied_in_bytes
    assert [t.text for t in run.records] == [t.text for t in plain.records]
    overlapped = [t.text for t in run.records if t.rule is MoveRule.OVERLAP]
    assert overlapped == ["train offload", "rollout onload"] * 5, "an engine that nobody wrote"
    assert run.planner.ledger.peak_device_bytes == 2 * NUM_BYTES
    assert plain.planner.ledger.peak_device_bytes == NUM_BYTES


@pytest.mark.parametrize("fault", range(4))  # copy out, allocate, copy in, empty
def test_a_handoff_that_fails_anywhere_frees_what_came_and_can_be_repeated(fault):
    run = Run(2 * NUM_BYTES)
    run.step()
    expected, slab = run.slab.trained.clone(), run.slab
    slab.device.operations_until_fault = fault
    with pytest.raises(InjectedError):
        run.planner.enter(Role.ROLLOUT)
    slab.device.require_idle()
    slab.device.require_used(NUM_BYTES)
    assert torch.equal(slab.trained, expected)
    assert run.planner.is_on_device(Role.TRAIN)
    run.planner.enter(Role.ROLLOUT)
    assert torch.equal(slab.sampled, random(1))
    assert torch.equal(slab.trainer.read(slab.trained), expected)


def test_a_device_with_less_memory_than_promised_loses_nothing():
    run = Run(2 * NUM_BYTES)
    run.slab.device.capacity_bytes = NUM_BYTES
    run.step()
    with pytest.raises(FakeDeviceError, match="out of memory"):
        run.planner.enter(Role.ROLLOUT)
    run.slab.device.require_used(NUM_BYTES)
    run.slab.device.require_idle()
    assert run.slab.trainer.is_resident
