"""Processes play the ranks and the test plays the launcher, which hosts the store."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist
from watched_rank import (
    HANG_SECONDS,
    Body,
    await_files,
    be_done,
    be_told_of_a_crash,
    be_told_to_set_a,
    close_slowly,
    fail,
    hang,
    lose_connection,
    play,
    set_a,
    set_b_after_a_lost_connection,
    stop_politely,
    stop_politely_twice_told,
)

from unirl.distributed import watch
from unirl.distributed.ranks import OneRank
from unirl.distributed.watch import watching


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
    ranks = start([lose_connection, set_b_after_a_lost_connection], tmp_path)
    assert end(ranks) == [1, 1]
    assert outcome(tmp_path, 0) == "RankError: rank 1: set b"
    assert outcome(tmp_path, 1) == "ConfigError: set b"


def test_a_broken_connection_without_a_cause_says_that_a_rank_was_killed(tmp_path: Path) -> None:
    assert end(start([lose_connection, hang], tmp_path)) == [1, 1]
    text = "lost contact with another rank, which was probably killed: [gloo/transport"
    assert outcome(tmp_path, 0).startswith(f"RankError: {text}")
    assert log(tmp_path, 1).startswith(text)


def test_an_agreed_error_stays_as_it_is_on_every_rank(tmp_path: Path) -> None:
    ranks = start([set_a, be_told_to_set_a, be_told_of_a_crash], tmp_path)
    assert end(ranks) == [1, 1, 1]
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
    assert end(start([be_done, close_slowly], tmp_path)) == [0, 0]
    assert outcome(tmp_path, 0) == outcome(tmp_path, 1) == "done"


class Started(list[BaseProcess]):
    """The ranks, with the store that their launcher would host.

    They are forked by a server without threads: a fork of this process may wait for ever for a
    lock that a thread of an earlier test held at that moment.
    """

    store: dist.TCPStore


def start(bodies: Sequence[Body], folder: Path) -> Started:
    ranks = Started()
    ranks.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([play.__module__])
    for rank, body in enumerate(bodies):
        arguments = (body, rank, len(bodies), ranks.store.port, folder)
        ranks.append(context.Process(target=play, args=arguments, daemon=True))
        ranks[-1].start()
    return ranks


def end(ranks: Started) -> list[int | None]:
    """Exit codes; None for a rank that still hangs, which is then killed."""
    deadline = time.monotonic() + HANG_SECONDS
    for rank in ranks:
        rank.join(max(deadline - time.monotonic(), 0))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes


def log(folder: Path, rank: int) -> str:
    return (folder / f"log-{rank}").read_text()


def outcome(folder: Path, rank: int) -> str:
    return (folder / f"outcome-{rank}").read_text()
