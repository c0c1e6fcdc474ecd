"""Worker processes that play the ranks of a run, started once and shared by all tests.

    def own_rank(number: int) -> int:  # in a test module: a worker imports it from there
        with joined() as ranks:
            return number + ranks.rank

    assert pool.run(2, own_rank, 10) == [10, 11]

A worker sees the variables that a launcher sets and runs one function after the other; what that
joins and what it leaves is the function's own business. Importing torch costs seconds, so a task in
a warm worker is about as cheap as in the test's own process.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

TASK_SECONDS = 120.0
AFTER_A_FAILURE_SECONDS = 30.0
"""Ranks that wait for a failed one are given up after this."""


class RanksFailedError(Exception):
    """A task failed on some rank; the text has every rank's traceback."""


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection


@dataclass(frozen=True)
class _Answer:
    """What a worker sends back, pickled by `pickle` so that tensors travel as bytes."""

    value: Any
    failure: str | None


class RankPool:
    """Runs functions as the ranks of one job; starts workers when a task first needs them."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []

    def run(
        self, num_ranks: int, function: Callable[..., T], *args: Any, **keywords: Any
    ) -> list[T]:
        """`function(*args, **keywords)` on ranks 0..num_ranks-1 at once; results in rank order.

        The function is found by its module and name, arguments and results are pickled. Raises
        RanksFailedError when it fails or dies on some rank, or takes longer than TASK_SECONDS;
        workers that cannot be trusted any more are replaced at the next task.
        """
        missing = num_ranks - len(self._workers)
        self._workers += [_start_worker() for _ in range(missing)]
        task = pickle.dumps((function, args, keywords))
        port = str(_free_port())
        for rank, worker in enumerate(self._workers[:num_ranks]):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            worker.connection.send((place, task))
        answers = _collect([worker.connection for worker in self._workers[:num_ranks]])
        if any(answer is None for answer in answers):
            self.close()
        failures = [
            f"rank {rank}: {'dead or stuck' if answer is None else answer.failure}"
            for rank, answer in enumerate(answers)
            if answer is None or answer.failure is not None
        ]
        if failures:
            raise RanksFailedError("\n".join(failures))
        return [answer.value for answer in answers if answer is not None]

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
            worker.process.join()
        self._workers = []


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks for tests of runs on several devices."""
    pool = RankPool()
    yield pool
    pool.close()


def _start_worker() -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _collect(connections: list[Connection]) -> list[_Answer | None]:
    """One answer per rank; None from a rank that died or did not answer in time."""
    answers: dict[Connection, _Answer | None] = {}
    end = time.monotonic() + TASK_SECONDS
    while len(answers) < len(connections):
        waiting = [one for one in connections if one not in answers]
        ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        for one in waiting:
            if one not in ready:
                continue
            answers[one] = answer = _receive(one)
            if answer is None or answer.failure is not None:
                end = min(end, time.monotonic() + AFTER_A_FAILURE_SECONDS)
    return [answers.get(one) for one in connections]


def _receive(connection: Connection) -> _Answer | None:
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        return None


def _work(connection: Connection) -> None:
    """A worker's life: tasks until the test session closes the pipe."""
    import torch

    torch.set_num_threads(1)
    folder = os.getcwd()
    while True:
        try:
            place, task = connection.recv()
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(_answer(place, task)))
        os.chdir(folder)


def _answer(place: Mapping[str, str], task: bytes) -> _Answer:
    os.environ.update(place)
    try:
        function, args, keywords = pickle.loads(task)
        return _Answer(function(*args, **keywords), None)
    except Exception:
        return _Answer(None, traceback.format_exc())
