"""Sends what a run measures to its sinks: console, files, wandb.

The trainer makes a `Row` of metrics per optimizer window and per evaluation; a `Tracker` hands it
to every `Sink`. A tracker without sinks is a valid, silent one.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

_log = logging.getLogger("unirl.tracking")


RowKind = Literal["rollout", "eval"]


@dataclass(frozen=True)
class Row:
    """Metrics of one moment of the run."""

    kind: RowKind
    rollout: int
    """rollout: id of the (last) rollout, from 0; eval: number of rollouts done before it."""
    optimizer_step: int
    """Optimizer steps done so far."""
    metrics: Mapping[str, float]
    """Names are listed in `tracking.metrics`."""


class Sink(ABC):
    """One place that rows and images go to."""

    @abstractmethod
    def log(self, row: Row) -> None: ...

    @abstractmethod
    def image(self, name: str, path: Path, rollout: int) -> None:
        """An image file that was just written; `name` is like a metric's, "eval/samples"."""

    @abstractmethod
    def close(self) -> None:
        """Finish writing; nothing is logged afterwards."""


class Tracker:
    """Fans out to sinks and closes all of them.

    with Tracker([JsonlSink(run_dir / "metrics.jsonl")]) as tracker:
        tracker.log(Row("rollout", 0, 1, {"rollout/reward_mean": 0.5}))
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def log(self, row: Row) -> None:
        for sink in self._sinks:
            sink.log(row)

    def image(self, name: str, path: Path, rollout: int) -> None:
        for sink in self._sinks:
            sink.image(name, path, rollout)

    def close(self) -> None:
        """Close every sink, then raise the first failure."""
        failures = self._close_all()
        if failures:
            raise failures[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failures = self._close_all()
        # An exception in flight is the one the user must see; the log has the others.
        if failures and error is None:
            raise failures[0]

    def _close_all(self) -> list[Exception]:
        failures: list[Exception] = []
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as failure:
                _log.warning("closing %s failed: %s", type(sink).__name__, failure)
                failures.append(failure)
        return failures
