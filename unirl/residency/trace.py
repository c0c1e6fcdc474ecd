"""The record of moves: one JSON line per transition, and counts for metrics."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from unirl.residency.planner import Transition
from unirl.tracking.files import output_errors


class TransitionLog:
    """Appends transitions to `transitions.jsonl` and counts them until asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with output_errors(path):
            self._file = path.open("a+", encoding="utf-8")
            self._file.seek(0)
            # A resumed run goes on counting where the file ends.
            self._first_seq = sum(1 for _ in self._file)
        self._rollout = 0
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0

    def at(self, rollout: int) -> None:
        """The rollout that following transitions belong to; for an evaluation, those before it."""
        self._rollout = rollout

    def record(self, transition: Transition) -> None:
        move = "onload" if transition.to_device else "offload"
        fields = {
            "seq": self._first_seq + transition.seq,
            "rollout": self._rollout,
            "role": transition.role.value,
            "move": move,
            "cause": transition.cause,
            "moved_bytes": transition.moved.num_bytes,
            "dropped_bytes": transition.moved.dropped_bytes,
            "seconds": transition.seconds,
        }
        with output_errors(self._path):
            self._file.write(json.dumps(fields) + "\n")
            self._file.flush()
        self._counts[f"{transition.role.value}_{move}s"] += 1
        self._counts["moved_bytes"] += transition.moved.num_bytes
        self._seconds += transition.seconds

    def take_metrics(self) -> dict[str, float]:
        """Counts, bytes and seconds since the last call."""
        metrics = {f"residency/{name}": float(count) for name, count in self._counts.items()}
        metrics["residency/seconds"] = self._seconds
        self._counts.clear()
        self._seconds = 0.0
        return metrics

    def close(self) -> None:
        with output_errors(self._path):
            self._file.close()
