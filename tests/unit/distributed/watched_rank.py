"""What the ranks of test_watch.py do, each in a process of its own."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unirl.core.errors import ConfigError, RankError
from unirl.distributed import watch
from unirl.distributed.ranks import Ranks
from unirl.distributed.watch import watching
from unirl.runtime.interrupt import GracefulStop

HANG_SECONDS = 60
"""What a test waits for at most; a rank that nobody ends hangs for ever."""
SHORTER = 2
"""By how much the waits of the watch are divided here."""


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


def play(body: Body, rank: int, world_size: int, port: int, folder: Path) -> None:
    """The whole process; writes its log and its outcome to files."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    for name in ("POLL_SECONDS", "NEWS_SECONDS", "GRACE_SECONDS"):
        setattr(watch, name, getattr(watch, name) / SHORTER)
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
    place.mark("loses")
    raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]")


def set_b_after_a_lost_connection(place: Place) -> None:
    await_files(place.folder, "loses", 1)
    raise ConfigError("set b")


def set_a(place: Place) -> None:
    raise ConfigError("set a")


def be_told_to_set_a(place: Place) -> None:
    raise ConfigError("rank 0: set a")


def be_told_of_a_crash(place: Place) -> None:
    raise RankError("rank 0: set a")


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


def be_done(place: Place) -> None:
    place.mark("done")


def close_slowly(place: Place) -> None:
    await_files(place.folder, "done", 1)
    time.sleep(2 * watch.POLL_SECONDS)
    assert not (place.folder / "outcome-0").exists()


def await_files(folder: Path, name: str, count: int) -> None:
    """Of so many ranks."""
    deadline = time.monotonic() + HANG_SECONDS
    while len(list(folder.glob(f"{name}-*"))) < count:
        assert time.monotonic() < deadline, f"fewer than {count} ranks came to {name!r}"
        time.sleep(0.02)
