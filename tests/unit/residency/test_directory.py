"""States and versions of copies: what may follow on what, and what parking must copy."""

from __future__ import annotations

import pytest
from recording_roles import RecordingPart

from unirl.core.components import VOID, Parking, Version
from unirl.core.errors import ResidencyError
from unirl.residency.directory import Directory, State

COPY, REBUILD, DROP = Parking.COPY, Parking.REBUILD, Parking.DROP


def directory_of(*parts: RecordingPart) -> Directory:
    return Directory(parts)


def park(directory: Directory, part: RecordingPart) -> bool:
    """As a transaction does it; returns whether it was copied."""
    copy = directory.needs_copy(part)
    directory.begin(part, to_device=False)
    part.park(copy=copy)
    directory.finish(part, to_device=False)
    return copy


def unpark(directory: Directory, part: RecordingPart) -> None:
    directory.begin(part, to_device=True)
    part.unpark()
    directory.finish(part, to_device=True)


class UnknownPart(RecordingPart):
    """Anything may have written it."""

    def version(self) -> Version:
        return Version(None)


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parking", "away"),
    [(COPY, State.PARKED), (REBUILD, State.DROPPED), (DROP, State.DROPPED)],
)
def test_a_part_is_resident_or_moving_or_away(parking, away):
    part = RecordingPart("train.some", parking=parking)
    directory = directory_of(part)
    seen = [directory.state(part)]
    assert directory.begin(part, to_device=False) is State.RESIDENT
    seen.append(directory.state(part))
    part.park(copy=parking is COPY)
    assert directory.finish(part, to_device=False) is away
    seen.append(directory.state(part))
    assert directory.begin(part, to_device=True) is away
    seen.append(directory.state(part))
    part.unpark()
    assert directory.finish(part, to_device=True) is State.RESIDENT
    assert seen == [State.RESIDENT, State.MOVING_OUT, away, State.MOVING_IN]


@pytest.mark.parametrize(
    ("parking", "state"),
    [(COPY, State.PARKED), (REBUILD, State.DROPPED), (DROP, State.DROPPED)],
)
def test_a_part_that_starts_off_the_device_is_away(parking, state):
    part = RecordingPart("rollout.some", is_resident=False, parking=parking)
    assert directory_of(part).state(part) is state


@pytest.mark.parametrize("to_device", [False, True])
def test_a_move_that_is_given_up_leaves_the_state_of_before(to_device):
    part = RecordingPart("train.some", is_resident=not to_device)
    directory = directory_of(part)
    before = directory.state(part)
    directory.give_up(part, directory.begin(part, to_device=to_device))
    assert directory.state(part) is before
    directory.begin(part, to_device=to_device)


@pytest.mark.parametrize(
    ("is_resident", "to_device", "message"),
    [
        (True, True, "train.base is resident and cannot become moving in"),
        (False, False, "train.base is parked and cannot become moving out"),
    ],
)
def test_a_move_to_where_it_is_already_is_refused(is_resident, to_device, message):
    part = RecordingPart("train.base", is_resident=is_resident)
    directory = directory_of(part)
    with pytest.raises(ResidencyError, match=f"^{message}; last changes: none$"):
        directory.begin(part, to_device=to_device)
    assert directory.state(part) is (State.RESIDENT if is_resident else State.PARKED)


def test_two_moves_at_once_are_refused():
    part = RecordingPart("train.base")
    directory = directory_of(part)
    directory.begin(part, to_device=False)
    for to_device in (False, True):
        with pytest.raises(ResidencyError, match=r"train.base is moving out and cannot become mo"):
            directory.begin(part, to_device=to_device)


def test_a_refusal_names_the_last_three_changes_of_all_parts():
    base, adapter = RecordingPart("train.base"), RecordingPart("train.adapter")
    directory = directory_of(base, adapter)
    park(directory, base)
    park(directory, adapter)
    with pytest.raises(ResidencyError) as caught:
        directory.begin(adapter, to_device=False)
    assert str(caught.value) == (
        "train.adapter is parked and cannot become moving out; last changes: "
        "train.base moving out -> parked; train.adapter resident -> moving out; "
        "train.adapter moving out -> parked"
    )


def test_what_is_poisoned_never_moves_again():
    part = RecordingPart("train.base")
    directory = directory_of(part)
    directory.poison(part)
    assert directory.state(part) is State.POISONED
    for to_device in (False, True):
        with pytest.raises(ResidencyError, match=r"train.base is poisoned and cannot become"):
            directory.begin(part, to_device=to_device)


# --- versions -------------------------------------------------------------------------------------


def test_a_first_park_copies_and_a_second_only_what_was_written_since():
    part = RecordingPart("train.adapter")
    directory = directory_of(part)
    assert directory.host_version(part) is VOID
    copied = []
    for writes in (0, 0, 1, 1, 3):
        part.writes = writes
        copied.append(park(directory, part))
        assert directory.host_version(part) == Version(writes)
        unpark(directory, part)
    assert copied == [True, False, True, False, True]
    assert part.moved == ["copy", "in", "drop", "in", "copy", "in", "drop", "in", "copy", "in"]


def test_a_part_that_starts_parked_has_a_host_copy_of_its_version():
    part = RecordingPart("rollout.base", is_resident=False)
    part.writes = 4
    directory = directory_of(part)
    assert directory.host_version(part) == Version(4)
    unpark(directory, part)
    assert not directory.needs_copy(part)


def test_a_version_that_is_unknown_is_always_copied():
    part = UnknownPart("train.buffers")
    directory = directory_of(part)
    for _ in range(3):
        assert park(directory, part)
        unpark(directory, part)


@pytest.mark.parametrize("parking", [REBUILD, DROP, Parking.KEEP])
def test_only_what_is_parked_as_a_copy_is_copied(parking):
    part = RecordingPart("rollout.graphs", parking=parking)
    directory = directory_of(part)
    part.writes = 5
    assert not directory.needs_copy(part)
    assert directory.host_version(part) is VOID


def test_contents_that_were_lost_never_replace_a_good_host_copy():
    part = RecordingPart("rollout.base")
    directory = directory_of(part)
    park(directory, part)
    unpark(directory, part)
    part.writes = None
    assert part.version() is VOID
    assert not directory.needs_copy(part)


def test_parts_with_one_host_key_share_one_copy():
    train = RecordingPart("train.base", host_key="network")
    rollout = RecordingPart("rollout.base", host_key="network")
    directory = directory_of(train, rollout)
    assert park(directory, train)
    assert directory.host_version(rollout) == Version(0)
    assert not park(directory, rollout)
    other = RecordingPart("reward.base")
    assert directory.host_version(other) is VOID


def test_a_copy_that_failed_is_not_relied_on():
    part = RecordingPart("train.adapter")
    directory = directory_of(part)
    directory.give_up(part, directory.begin(part, to_device=False))
    assert directory.host_version(part) is VOID
    assert directory.needs_copy(part)


# --- what is missing ------------------------------------------------------------------------------


def test_parts_on_the_device_with_contents_miss_nothing():
    assert directory_of(part := RecordingPart("rollout.base")).missing([part]) == []


def test_what_is_away_is_named_with_its_state_and_the_version_of_its_host_copy():
    parked = RecordingPart("rollout.base", is_resident=False)
    dropped = RecordingPart("rollout.graphs", is_resident=False, parking=REBUILD)
    parked.writes = 2
    assert directory_of(parked, dropped).missing([parked, dropped]) == [
        "rollout.base is parked (host copy version 2)",
        "rollout.graphs is dropped (host copy VOID)",
    ]


def test_what_has_lost_its_contents_is_named_with_who_could_fill_it():
    adapter = RecordingPart("rollout.adapter", parking=DROP, written_by="push")
    base = RecordingPart("rollout.base", parking=DROP, written_by="reload")
    adapter.writes = base.writes = None
    directory = directory_of(adapter, base)
    lost = "is VOID on the device (host copy VOID); only"
    needs_push = f"rollout.adapter {lost} push fills it"
    needs_reload = f"rollout.base {lost} reload fills it"
    assert directory.missing([adapter, base]) == [needs_push, needs_reload]
    assert directory.missing([adapter, base], besides="push") == [needs_reload]


def test_scratch_that_nobody_fills_is_used_empty():
    scratch = RecordingPart("rollout.cache", parking=DROP)
    scratch.writes = None
    assert directory_of(scratch).missing([scratch]) == []
