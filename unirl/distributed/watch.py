"""One rank's failure ends all ranks within seconds, also those that wait inside a collective.

A rank whose main thread hangs in NCCL runs no Python signal handler, so every rank has a thread
that looks at a notice board: the launcher's TCP store, over a connection of its own. The first
failing rank pins its error there; the others leave with that error, by themselves or by force. A
killed rank pins nothing, but its launcher then sends SIGTERM to the rest of its machine, which the
thread tells apart from a SIGTERM to the whole run. No collective is used.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from unirl.core.errors import RankError, UnirlError
from unirl.distributed.ranks import Ranks

T = TypeVar("T")

logger = logging.getLogger("unirl.distributed")

POLL_SECONDS = 0.5
"""How late another rank's failure is seen; each look is one small request to the store."""
NEWS_SECONDS = 3.0
"""A broken connection is seen before its cause may be on the board: how long to wait for that."""
GRACE_SECONDS = 5.0
"""How long the main thread may take to end by itself; also for a SIGTERM to reach all ranks."""

MAIN_THREAD_LEFT = 0
"""Byte to the thread: the main thread has left. No signal has this number."""
PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h."""
SIGTERM_ALONE = (
    "this rank was told to end, but not all ranks were: another one was probably killed "
    "(out of memory?)"
)


@contextmanager
def watching(ranks: Ranks) -> Iterator[None]:
    """Around everything a rank does, in its main thread; does nothing for a single rank.

    A clean end waits until the others' bodies have ended too, so that no launcher stops a rank
    that still closes its files because another one is already gone. A SIGTERM that reaches all
    ranks arrives, once, at the handler that was there before.

    An error of the body goes on as it is where it was the run's first failure or has a text for
    the user. A consequence of another rank's failure is replaced:

    Raises:
        RankError: with the text of the run's first failure, or saying that contact was lost.
    """
    if ranks.world_size == 1:
        yield
        return
    _die_with_the_launcher()
    board = _NoticeBoard(_connect(), ranks)
    with _Watch(board):
        try:
            yield
            _leave_together(board)
        except RankError as error:
            _leave_the_news_to_its_rank(board, error)
            raise
        except (Exception, KeyboardInterrupt) as error:
            cause = _cause_elsewhere(board, error)
            if cause is not None:
                raise RankError(cause) from error
            raise


def _cause_elsewhere(board: _NoticeBoard, error: Exception | KeyboardInterrupt) -> str | None:
    """What to report in place of this rank's error; None where that is the one to report."""
    if isinstance(error, KeyboardInterrupt):
        board.announce(f"rank {board.rank}: interrupted")
        return None
    if _is_broken_connection(error):
        board.wait_for_failure(NEWS_SECONDS)
        what = str(error).partition("\n")[0].partition(". ")[0]  # general advice follows
        lost = f"lost contact with another rank, which was probably killed: {what}"
        return board.announce(lost).text
    is_for_user = isinstance(error, UnirlError)
    kind = "" if is_for_user else f"{type(error).__name__}: "
    own = f"rank {board.rank}: {kind}{error}"
    first = board.announce(own)
    is_first = first.rank == board.rank
    if is_first and not is_for_user:
        get_error_handler().record_exception(error)  # torch's launcher reads it
    is_reported = is_first or is_for_user
    if board.rank != 0 or not is_reported:  # else it is printed
        logger.error("%s", own, exc_info=not is_for_user)
    return None if is_reported else first.text


def _leave_the_news_to_its_rank(board: _NoticeBoard, error: RankError) -> None:
    """The rank that the error tells of announces it better; but somebody must."""
    if board.wait_for_failure(NEWS_SECONDS) is None:
        board.announce(str(error))


def _is_broken_connection(error: BaseException) -> bool:
    """Gloo raises bare RuntimeErrors; they name the source file of its transport."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error)


def _leave_together(board: _NoticeBoard) -> None:
    board.add_left()
    while not board.have_all_left():
        failure = board.failure()
        if failure is not None:
            raise RankError(failure.text)
        time.sleep(0.1)


def _die_with_the_launcher() -> None:
    """Torch's launcher puts ranks into sessions of their own, where its SIGKILL would orphan them.

    The kernel then kills them too. Only for that launcher: it starts ranks from its main thread,
    and the kernel's signal is tied to the starting thread.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _connect() -> dist.Store:
    """A client of its own: another client's blocking call would keep this one waiting."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives a restart
    return dist.PrefixStore(f"unirl/watch/{attempt}", store)


@dataclass(frozen=True)
class _Failure:
    """The run's first failure."""

    rank: int
    """Who announced it."""
    text: str
    """For the user; names the rank that failed."""


class _NoticeBoard:
    """What the ranks tell each other.

    The host of the store may be gone, since it died or since the run is over. Then nothing more
    is learned: no failure, no other rank's SIGTERM, and nobody to wait for.
    """

    def __init__(self, store: dist.Store, ranks: Ranks) -> None:
        self.rank = ranks.rank
        self._world_size = ranks.world_size
        self._store = store

    def announce(self, text: str) -> _Failure:
        """The first failure, which is this one unless another was announced before."""
        own = f"{self.rank} {text}"
        first = _answer(lambda: self._store.compare_set("failure", "", own).decode(), own)
        return _parse(first)

    def failure(self) -> _Failure | None:
        def look() -> _Failure | None:
            if not self._store.check(["failure"]):
                return None
            return _parse(self._store.get("failure").decode())

        return _answer(look, None)

    def wait_for_failure(self, seconds: float) -> _Failure | None:
        deadline = time.monotonic() + seconds
        failure = self.failure()
        while failure is None and time.monotonic() < deadline:
            time.sleep(0.1)
            failure = self.failure()
        return failure

    def add_terminated(self) -> None:
        """This rank got SIGTERM; said once."""
        _answer(lambda: self._store.add("terminated", 1), 0)

    def are_all_terminated(self) -> bool:
        return _answer(lambda: self._store.add("terminated", 0) >= self._world_size, False)

    def add_left(self) -> None:
        """This rank's work is done; said once."""
        _answer(lambda: self._store.add("left", 1), 0)

    def have_all_left(self) -> bool:
        return _answer(lambda: self._store.add("left", 0) >= self._world_size, True)


def _answer(ask: Callable[[], T], without_store: T) -> T:
    try:
        return ask()
    except RuntimeError:  # among them all of torch.distributed's errors
        return without_store


def _parse(notice: str) -> _Failure:
    rank, _, text = notice.partition(" ")
    return _Failure(int(rank), text)


class _MainThreadLeftError(Exception):
    """Nothing is left to watch."""


class _Watch:
    """The thread. Signals reach it through the wakeup socket, which C code fills.

    Python's handlers still run, as soon as the main thread is back from C++. SIGTERM's does nothing
    meanwhile: once it turns out that all ranks are to stop, the thread sends it again, and it
    reaches the handler that was there before.
    """

    def __init__(self, board: _NoticeBoard) -> None:
        self._board = board
        self._inbox, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._previous_wakeup = -1
        self._previous_handler: Any = None
        self._is_asked_to_stop = False
        """By a SIGINT; a second one would end this rank at once."""
        self._is_run_terminated = False
        """All ranks got SIGTERM, and further ones mean the same."""
        self._was_passed_on = False
        self._thread = threading.Thread(target=self._run, name="unirl-watch", daemon=True)

    def __enter__(self) -> Self:
        wakeup = self._wakeup.fileno()
        self._previous_wakeup = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        # Not SIG_IGN: C code fills the socket for signals with a Python handler.
        self._previous_handler = signal.signal(signal.SIGTERM, self._handle_sigterm)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGTERM, self._previous_handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._wakeup.send(bytes([MAIN_THREAD_LEFT]))
        self._thread.join(GRACE_SECONDS)
        if not self._thread.is_alive():  # else it waits for a store that does not answer
            self._inbox.close()
            self._wakeup.close()

    def _handle_sigterm(self, number: int, frame: FrameType | None) -> None:
        """In the main thread."""
        if self._is_run_terminated and not (self._was_passed_on or self._is_asked_to_stop):
            self._was_passed_on = True
            if not callable(self._previous_handler):
                raise KeyboardInterrupt
            self._previous_handler(number, frame)

    def _run(self) -> None:
        with suppress(_MainThreadLeftError):
            while True:
                number = self._next_signal(POLL_SECONDS)
                if number == signal.SIGTERM and not self._is_run_terminated:
                    self._understand_sigterm()
                failure = self._board.failure()
                if failure is not None:
                    self._give_main_thread(GRACE_SECONDS)
                    _end_process(failure.text)

    def _understand_sigterm(self) -> None:
        """Return when all ranks got it or another failure explains it; else end this rank."""
        deadline = time.monotonic() + GRACE_SECONDS
        self._board.add_terminated()
        while time.monotonic() < deadline:
            self._next_signal(0.1)
            if self._board.are_all_terminated():
                self._is_run_terminated = True
                os.kill(os.getpid(), signal.SIGTERM)
                return
            if self._board.failure() is not None:
                return
        _end_process(self._board.announce(SIGTERM_ALONE).text)

    def _give_main_thread(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._next_signal(deadline - time.monotonic())

    def _next_signal(self, seconds: float) -> int | None:
        """Its number, or None after so many seconds. Raises _MainThreadLeftError."""
        self._inbox.settimeout(max(seconds, 0.01))
        try:
            number = self._inbox.recv(1)[0]
        except TimeoutError:
            return None
        if number == MAIN_THREAD_LEFT:
            raise _MainThreadLeftError
        self._is_asked_to_stop |= number == signal.SIGINT
        return number


def _end_process(text: str) -> NoReturn:
    """Without Python's cleaning up, which the hanging main thread would have to do."""
    try:
        logger.error("%s", text)
    finally:
        os._exit(1)
