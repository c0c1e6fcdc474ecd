"""Forked processes play the ranks and the test plays the launcher, which hosts the store."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed as dist

from unirl.core.errors import ConfigError, RankError
from unirl.distributed import watch
from unirl.distributed.ranks import OneRank, Ranks
from unirl.distributed.watch import watching
from unirl.runtime.interrupt import GracefulStop

HANG_SECONDS = 20
"""What a test waits for at most; a rank that nobody ends hangs for ever."""


class Alone(Ranks):
    """One of several ranks whose collectives must not be used."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def gather(self, value: object) -> list:
        raise AssertionError("the watch used a collective")

    broadcast = gather

    def barrier(self) -> None:
        raise AssertionError("the watch used a collective")


@dataclass(frozen=True)
class Place:
    """Where a rank's body runs."""

    rank: int
    folder: Path
    stop: GracefulStop

    def mark(self, name: str) -> None:
        (self.folder / f"{name}-{self.rank}").touch()


Body = Callable[[Place], None]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_SECONDS", "NEWS_SECONDS", "GRACE_SECONDS"):
        monkeypatch.setattr(watch, name, getattr(watch, name) / 5)


def hang(place: Place) -> None:
    """As in a collective: in one C call without the GIL, which goes on after a signal."""
    place.mark("hangs")
    libc = ctypes.CDLL(None)
    barrier = ctypes.create_string_buffer(64)
    libc.pthread_barrier_init(barrier, None, 2)
    libc.pthread_barrier_wait(barrier)


def fail(place: Place) -> None:
    await_files(place.folder, "hangs", 2)
    raise ValueError("bad weather")


def lose_connection(place: Place) -> None:
    raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]")


def stop_politely(place: Place) -> None:
    place.mark("ready")
    while not place.stop.requested():
        time.sleep(0.05)
    assert place.stop.exit_code == 143
    time.sleep(2 * watch.GRACE_SECONDS)  # saving takes longer than the decision
    place.mark("saved")


def stop_politely_twice_told(place: Place) -> None:
    """SLURM tells every process, and torch's launcher, told too, tells its ranks again."""
    place.mark("ready")
    while not place.stop.requested():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(2 * watch.GRACE_SECONDS)
    place.mark("saved")


def test_one_rank_is_not_watched() -> None:
    before = threading.active_count(), signal.set_wakeup_fd(-1)
    with watching(OneRank()):
        assert (threading.active_count(), signal.set_wakeup_fd(-1)) == before


def test_an_error_ends_ranks_that_hang_outside_python(tmp_path: Path) -> None:
    ranks = start([hang, hang, fail], tmp_path)
    assert end(ranks) == [1, 1, 1]
    assert log(tmp_path, 0) == log(tmp_path, 1) == "rank 2: ValueError: bad weather\n"
    assert "in fail" in log(tmp_path, 2)  # its own log has the traceback
    assert outcome(tmp_path, 2) == "ValueError: bad weather"


def test_a_broken_connection_is_reported_as_the_failure_behind_it(tmp_path: Path) -> None:
    def fail_after(place: Place) -> None:
        await_files(place.folder, "loses", 1)
        raise ConfigError("set b")

    def lose_first(place: Place) -> None:
        place.mark("loses")
        lose_connection(place)

    assert end(start([lose_first, fail_after], tmp_path)) == [1, 1]
    assert outcome(tmp_path, 0) == "RankError: rank 1: set b"
    assert outcome(tmp_path, 1) == "ConfigError: set b"


def test_a_broken_connection_without_a_cause_says_that_a_rank_was_killed(tmp_path: Path) -> None:
    assert end(start([lose_connection, hang], tmp_path)) == [1, 1]
    text = "lost contact with another rank, which was probably killed: [gloo/transport"
    assert outcome(tmp_path, 0).startswith(f"RankError: {text}")
    assert log(tmp_path, 1).startswith(text)


def test_an_agreed_error_stays_as_it_is_on_every_rank(tmp_path: Path) -> None:
    def own(place: Place) -> None:
        raise ConfigError("set a")

    def told(place: Place) -> None:
        raise ConfigError("rank 0: set a")

    def told_of_a_crash(place: Place) -> None:
        raise RankError("rank 0: set a")

    assert end(start([own, told, told_of_a_crash], tmp_path)) == [1, 1, 1]
    assert outcome(tmp_path, 0) == "ConfigError: set a"
    assert outcome(tmp_path, 1) == "ConfigError: rank 0: set a"
    assert outcome(tmp_path, 2) == "RankError: rank 0: set a"


def test_sigterm_to_all_ranks_lets_them_finish(tmp_path: Path) -> None:
    ranks = start([stop_politely, stop_politely, stop_politely_twice_told], tmp_path)
    await_files(tmp_path, "ready", 3)
    for rank in ranks:
        rank.terminate()
    assert end(ranks) == [0, 0, 0]
    assert len(list(tmp_path.glob("saved-*"))) == 3
    assert log(tmp_path, 0).startswith("stopping: finishing the phase in hand")


def test_sigterm_to_the_survivors_of_a_killed_rank_ends_every_rank(tmp_path: Path) -> None:
    """Rank 1 is on the machine of the killed rank 2; rank 0 is on another and hears of it."""
    ranks = start([hang, hang, hang], tmp_path)
    await_files(tmp_path, "hangs", 3)
    ranks[2].kill()
    ranks[1].terminate()
    assert end(ranks) == [1, 1, -signal.SIGKILL]
    assert log(tmp_path, 0) == log(tmp_path, 1) == f"{watch.SIGTERM_ALONE}\n"


def test_sigterm_without_a_store_ends_the_rank(tmp_path: Path) -> None:
    ranks = start([hang] * 2, tmp_path)
    await_files(tmp_path, "hangs", 2)
    del ranks.store
    ranks[1].terminate()
    ranks[1].join(HANG_SECONDS)
    assert ranks[1].exitcode == 1
    assert ranks[0].is_alive()  # a store that is gone is no failure by itself
    ranks[0].kill()


def test_a_rank_leaves_when_all_are_done(tmp_path: Path) -> None:
    """A launcher that sees one rank exit with code 130 stops the others: they must be done."""

    def done(place: Place) -> None:
        place.mark("done")

    def close_slowly(place: Place) -> None:
        await_files(place.folder, "done", 1)
        time.sleep(2 * watch.POLL_SECONDS)
        assert not (place.folder / "outcome-0").exists()

    assert end(start([done, close_slowly], tmp_path)) == [0, 0]
    assert outcome(tmp_path, 0) == outcome(tmp_path, 1) == "done"


class Started(list[BaseProcess]):
    """The ranks, with the store that their launcher would host."""

    store: dist.TCPStore


def start(bodies: Sequence[Body], folder: Path) -> Started:
    ranks = Started()
    ranks.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    for rank, body in enumerate(bodies):
        arguments = (body, rank, len(bodies), ranks.store.port, folder)
        ranks.append(context.Process(target=play, args=arguments, daemon=True))
        ranks[-1].start()
    return ranks


def play(body: Body, rank: int, world_size: int, port: int, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    logger = logging.getLogger("unirl")
    logger.handlers = [logging.FileHandler(folder / f"log-{rank}")]
    logger.propagate = False
    text = "done"
    before = signal.set_wakeup_fd(-1), signal.getsignal(signal.SIGTERM)
    try:
        with GracefulStop() as stop, watching(Alone(rank, world_size)):
            body(Place(rank, folder, stop))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    assert (signal.set_wakeup_fd(-1), signal.getsignal(signal.SIGTERM)) == before
    (folder / f"outcome-{rank}").write_text(text)
    os._exit(0 if text == "done" else 1)


def end(ranks: Started) -> list[int | None]:
    """Exit codes; None for a rank that still hangs, which is then killed."""
    deadline = time.monotonic() + HANG_SECONDS
    for rank in ranks:
        rank.join(max(deadline - time.monotonic(), 0))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes


def await_files(folder: Path, name: str, count: int) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while len(list(folder.glob(f"{name}-*"))) < count:
        assert time.monotonic() < deadline, f"fewer than {count} ranks came to {name!r}"
        time.sleep(0.02)


def log(folder: Path, rank: int) -> str:
    return (folder / f"log-{rank}").read_text()


def outcome(folder: Path, rank: int) -> str:
    return (folder / f"outcome-{rank}").read_text()
