"""The record of moves: one JSON line per component that moved, and counts for metrics.

A run and a plan write the same lines, so the two can be compared (`unirl plan --compare`).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unirl.core.components import Moved
from unirl.residency.perfetto import TraceFile
from unirl.residency.transition import MoveRule, Transition
from unirl.tracking.files import output_errors


def lines_of(
    transition: Transition, number: int, rollout: int, during: str
) -> Iterator[dict[str, Any]]:
    """The transition's components as records; one without a component where nothing moved."""
    common = {
        "transition": number,
        "rollout": rollout,
        "during": during,
        "role": transition.role.value,
        "move": "onload" if transition.to_device else "offload",
        "cause": transition.cause,
        "rule": transition.rule.value,
    }
    if not transition.moves:
        yield {**common, "component": None, "seconds": transition.seconds, **_bytes(Moved(0))}
    for move in transition.moves:
        yield {
            **common,
            "component": move.component,
            "from": move.source.value,
            "to": move.target.value,
            "version": move.version,
            **_bytes(move.moved),
            "seconds": move.seconds,
            "device_bytes": move.device_bytes,
            "host_bytes": move.host_bytes,
        }


def _bytes(moved: Moved) -> dict[str, int]:
    return {"moved_bytes": moved.num_bytes, "dropped_bytes": moved.dropped_bytes}


class TransitionLog:
    """Appends moves to `transitions.jsonl` and a trace, and counts transitions until asked."""

    def __init__(self, path: Path, trace: TraceFile) -> None:
        self._path = path
        self._trace = trace
        with output_errors(path):
            self._file = path.open("a+", encoding="utf-8")
            self._file.seek(0)
            # A resumed run goes on counting where the file ends.
            lines = list(self._file)
        self._num_lines = len(lines)
        self._num_transitions = json.loads(lines[-1])["transition"] if lines else 0
        self._rollout = 0
        self._during = "start"
        self._counts: Counter[str] = Counter()
        self._seconds = {"onload": 0.0, "offload": 0.0}
        self._elapsed_seconds = 0.0
        self._phase_seconds: defaultdict[str, float] = defaultdict(float)

    def at(self, rollout: int, during: str) -> None:
        """Where following transitions belong: `window` with the rollout's id, `evaluation` or
        `save` with the number of rollouts done."""
        self._rollout = rollout
        self._during = during

    def phase_ended(self, name: str, seconds: float) -> None:
        """For the trace."""
        self._trace.phase(name, seconds)

    def record(self, transition: Transition) -> None:
        self._num_transitions += 1
        with output_errors(self._path):
            number = self._num_transitions
            lines = list(lines_of(transition, number, self._rollout, self._during))
            for line in lines:
                self._num_lines += 1
                self._file.write(json.dumps({"seq": self._num_lines, **line}) + "\n")
            self._file.flush()
        self._trace.moves(lines)
        move = "onload" if transition.to_device else "offload"
        if not transition.is_loan:
            self._counts[f"{transition.role.value}_{move}s"] += 1
        self._counts[f"{move}_bytes"] += transition.moved.num_bytes
        self._counts["dropped_bytes"] += transition.moved.dropped_bytes
        self._seconds[move] += transition.seconds
        # What leaves while others come takes the time that these take.
        is_beside = transition.rule is MoveRule.OVERLAP and not transition.to_device
        elapsed = 0.0 if is_beside else transition.seconds
        self._elapsed_seconds += elapsed
        phase = transition.cause.removeprefix("enter ").removeprefix("set ").replace(" ", "_")
        self._counts[f"for_{phase}_bytes"] += transition.moved.num_bytes
        self._phase_seconds[phase] += elapsed

    def take_metrics(self) -> dict[str, float]:
        """Counts, bytes, seconds and GB/s since the last call."""
        metrics = {f"residency/{name}": float(count) for name, count in self._counts.items()}
        metrics["residency/seconds"] = self._elapsed_seconds
        for phase, seconds in self._phase_seconds.items():
            metrics[f"residency/for_{phase}_seconds"] = seconds
            if moved := self._counts[f"for_{phase}_bytes"]:
                metrics[f"residency/for_{phase}_gb_per_second"] = moved / seconds / 1e9
        self._phase_seconds.clear()
        self._elapsed_seconds = 0.0
        for move, seconds in self._seconds.items():
            if self._counts[f"{move}_bytes"]:
                rate = self._counts[f"{move}_bytes"] / seconds / 1e9
                metrics[f"residency/{move}_gb_per_second"] = rate
            self._seconds[move] = 0.0
        self._counts.clear()
        return metrics

    def close(self) -> None:
        self._trace.close()
        with output_errors(self._path):
            self._file.close()
