"""Keeps a sink that others wrote away from the loop: in a thread of its own, behind a queue.

A slow sink loses rows rather than slow the run down, one that raises is left out from then on, and
one that hangs is left behind at the end. `metrics.jsonl` has every row in any case: it is the run's
record and is never behind a queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Full, Queue
from threading import Thread

from unirl.tracking.tracker import Panel, Row, Sink

_log = logging.getLogger("unirl.tracking")

CAPACITY = 1000
"""Rows and panels that may wait for a sink."""
PATIENCE_SECONDS = 30.0
"""How long the end of a run waits for each sink to send what it has."""


class BackgroundSink(Sink):
    """Another sink, which gets everything in order and can neither slow nor end the run.

    Build the inner sink first: what is wrong at the start is still an error before training.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        capacity: int = CAPACITY,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """`name` is what warnings call it: "wandb"."""
        self._name = name
        self._sink = sink
        self._patience_seconds = patience_seconds
        self._jobs: Queue[Callable[[], None]] = Queue(capacity)
        self._num_dropped = 0
        # A daemon: one that hangs must not keep the process.
        self._thread = Thread(target=self._work, name=f"unirl-{name}", daemon=True)
        self._thread.start()

    def log(self, row: Row) -> None:
        self._put(lambda: self._sink.log(row))

    def show(self, panel: Panel) -> None:
        self._put(lambda: self._sink.show(panel))

    def close(self) -> None:
        """Wait until everything is sent, but not longer than the patience."""
        ends_at = time.monotonic() + self._patience_seconds
        with suppress(Full):
            self._jobs.put(self._sink.close, timeout=self._patience_seconds)
        self._thread.join(max(0.0, ends_at - time.monotonic()))
        if self._thread.is_alive():
            _log.warning(
                "%s did not finish within %g s and was left behind; metrics.jsonl has every row",
                self._name,
                self._patience_seconds,
            )
        if self._num_dropped:
            _log.warning(
                "%s was too slow: %d rows and panels were not sent to it; metrics.jsonl has "
                "every row",
                self._name,
                self._num_dropped,
            )

    def _put(self, job: Callable[[], None]) -> None:
        try:
            self._jobs.put_nowait(job)
        except Full:
            self._num_dropped += 1

    def _work(self) -> None:
        """Do jobs up to `close`; after a failure take them and do nothing."""
        works = True
        while True:
            job = self._jobs.get()
            is_last = job == self._sink.close
            if works:
                works = self._attempt(job)
                if not works and not is_last:
                    with suppress(Exception):
                        self._sink.close()
            if is_last:
                return

    def _attempt(self, job: Callable[[], None]) -> bool:
        """Whether it succeeded."""
        try:
            job()
        except Exception as error:
            _log.warning(
                "%s failed and is left out from now on; the run goes on and metrics.jsonl has "
                "every row: %s: %s",
                self._name,
                type(error).__name__,
                error,
            )
            return False
        return True
