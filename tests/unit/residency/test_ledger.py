"""Bytes of both memories: who holds how much, what is counted once, and what is refused."""

from __future__ import annotations

import pytest
from recording_roles import RecordingPart

from unirl.core.errors import ResidencyError
from unirl.residency.ledger import Ledger

GIB = 2**30


def ledger_of(*parts: RecordingPart, budget_bytes: int | None = None) -> Ledger:
    ledger = Ledger(budget_bytes)
    ledger.read(parts)
    return ledger


def test_the_device_holds_what_is_resident_and_the_host_what_was_copied():
    base, moments = RecordingPart("base", 30), RecordingPart("moments", 20)
    ledger = ledger_of(base, moments)
    assert (ledger.device_bytes, ledger.host_bytes) == (50, 0)
    base.park(copy=True)
    ledger.update(base)
    assert (ledger.device_bytes, ledger.host_bytes) == (20, 30)
    base.unpark()
    ledger.update(base)
    assert (ledger.device_bytes, ledger.host_bytes) == (50, 30), "the host copy stays"


def test_a_host_copy_with_several_readers_is_counted_once_and_device_memory_twice():
    train = RecordingPart("train.base", 30, host_key="network")
    rollout = RecordingPart("rollout.base", 30, host_key="network")
    ledger = ledger_of(train, rollout)
    train.park(copy=True)
    rollout.park(copy=False)
    for part in (train, rollout):
        ledger.update(part)
    assert (ledger.device_bytes, ledger.host_bytes) == (0, 30)
    ledger.read([train, rollout])
    assert ledger.host_bytes == 30, "also when the second reader says that it has none"
    for part in (train, rollout):
        part.unpark()
        ledger.update(part)
    assert ledger.device_bytes == 60


def test_the_peak_is_of_the_fullest_moment_and_stays():
    parts = [RecordingPart(name, size) for name, size in (("a", 10), ("b", 25))]
    parts[1].park(copy=True)
    ledger = ledger_of(*parts)
    assert ledger.peak_device_bytes == 10
    parts[1].unpark()
    ledger.update(parts[1])
    parts[0].park(copy=True)
    ledger.update(parts[0])
    assert (ledger.device_bytes, ledger.peak_device_bytes) == (25, 35)
    ledger.read(parts)
    assert ledger.peak_device_bytes == 35


def test_moments_that_appeared_are_seen_at_the_next_reading():
    moments = RecordingPart("moments", 0)
    ledger = ledger_of(moments)
    moments.size = 40
    assert ledger.device_bytes == 0
    ledger.read([moments])
    assert (ledger.device_bytes, ledger.peak_device_bytes) == (40, 40)


def test_a_host_copy_that_was_made_anew_is_seen_at_the_next_reading():
    part = RecordingPart("moments", 30)
    part.park(copy=True)
    ledger = ledger_of(part)
    part.unpark()
    part.size = 10
    part.park(copy=True)
    ledger.read([part])
    assert ledger.host_bytes == 10


def test_a_part_that_is_gone_is_no_longer_counted():
    kept, gone = RecordingPart("kept", 1), RecordingPart("gone", 2)
    ledger = ledger_of(kept, gone)
    ledger.read([kept])
    assert ledger.device_bytes == 1


@pytest.mark.parametrize(("budget_bytes", "fits"), [(None, True), (50, True), (49, False)])
def test_what_exactly_fits_is_let_in(budget_bytes, fits):
    there, coming = RecordingPart("there", 30), RecordingPart("coming", 20, is_resident=False)
    ledger = ledger_of(there, coming, budget_bytes=budget_bytes)
    if fits:
        ledger.require_room(coming)
        return
    with pytest.raises(ResidencyError, match="coming needs"):
        ledger.require_room(coming)


def test_a_refusal_names_what_was_asked_what_is_there_and_which_keys_help():
    sizes = {"train.base": 40, "train.moments": 10, "reward.clip": 4, "train.adapter": 1}
    there = [RecordingPart(name, size * GIB) for name, size in sizes.items()]
    coming = RecordingPart("rollout.base", 25 * GIB + GIB // 2, is_resident=False)
    ledger = ledger_of(*there, coming, budget_bytes=76 * GIB)
    with pytest.raises(ResidencyError) as caught:
        ledger.require_room(coming)
    assert str(caught.value) == (
        "rollout.base needs 25.5 GiB beside 55.0 GiB on the device, which is more than "
        "device_budget_gib (76.0 GiB); the largest there: train.base 40.0 GiB, train.moments "
        "10.0 GiB, reward.clip 4.0 GiB. Park more (train_resident, rollout_resident, "
        "reward_resident), or raise device_budget_gib."
    )
