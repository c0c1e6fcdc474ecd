"""Sends what a run measures to its sinks: console, files, trackers such as wandb.

The trainer makes a `Row` of metrics per optimizer window and per evaluation; a `Tracker` hands it
to every `Sink`. A tracker without sinks is a valid, silent one.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
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

    @property
    def rollouts_done(self) -> int:
        """By the end of it: one axis for windows and evaluations."""
        return self.rollout + 1 if self.kind == "rollout" else self.rollout

    def axes(self) -> dict[str, float]:
        """The x-values of its families, for trackers that draw one metric over another."""
        done = float(self.rollouts_done)
        if self.kind == "eval":
            return {"eval/step": done}
        return {"rollout/step": done, "train/step": float(self.optimizer_step)}


@dataclass(frozen=True)
class Picture:
    """An image file that was just written."""

    path: Path
    text: str = ""
    """What it was asked for."""
    reward: float | None = None

    @property
    def caption(self) -> str:
        """`0.512 a red cat`."""
        return self.text if self.reward is None else f"{self.reward:.3f} {self.text}"


@dataclass(frozen=True)
class Panel:
    """Pictures that belong together: the same prompts and noise at each evaluation."""

    name: str
    """Listed in `tracking.metrics`."""
    rollouts_done: int
    pictures: tuple[Picture, ...]

    def tagged(self) -> Iterator[tuple[str, Picture]]:
        """Each under a name of its own: "eval/grid", or "eval/samples/0003" of several."""
        if len(self.pictures) == 1:
            yield self.name, self.pictures[0]
            return
        for number, picture in enumerate(self.pictures):
            yield f"{self.name}/{number:04d}", picture


class Sink(ABC):
    """One place that rows and pictures go to."""

    @abstractmethod
    def log(self, row: Row) -> None: ...

    @abstractmethod
    def show(self, panel: Panel) -> None: ...

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

    def show(self, panel: Panel) -> None:
        for sink in self._sinks:
            sink.show(panel)

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
