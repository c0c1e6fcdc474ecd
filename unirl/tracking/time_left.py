"""How long a run still takes, from what its rollouts, evaluations and saves took so far."""

from __future__ import annotations

from collections.abc import Callable

from unirl.tracking.tracker import Row


class TimeLeft:
    """Means of this start of the run: a resume counts neither what was before nor the pause.

    Evaluations and saves have means of their own, since few or many may be left.
    """

    def __init__(
        self,
        num_rollouts: int,
        first_rollout: int,
        is_evaluated: Callable[[int], bool],
        is_saved: Callable[[int], bool],
    ) -> None:
        """`is_evaluated` and `is_saved` say what follows after so many rollouts."""
        self._num_rollouts = num_rollouts
        self._first_rollout = first_rollout
        self._done = first_rollout
        self._is_evaluated = is_evaluated
        self._is_saved = is_saved
        self._evaluation_is_next = False
        self._unmeasured_evaluations = 0
        self._evaluations = 0
        self._window_seconds = 0.0
        self._evaluate_seconds = 0.0
        self._save_seconds = 0.0

    def add(self, row: Row) -> None:
        if row.kind == "eval":
            self._unmeasured_evaluations += 1
            self._evaluation_is_next = False
            return
        self._done = row.rollouts_done
        self._evaluation_is_next = self._is_evaluated(self._done)
        # A row has the seconds of its window, and of what came since the one before.
        self._evaluations += self._unmeasured_evaluations
        self._unmeasured_evaluations = 0
        # The doctor looks once.
        self._window_seconds += row.metrics.get("perf/total_seconds", 0.0)
        self._window_seconds -= row.metrics.get("perf/doctor_seconds", 0.0)
        self._evaluate_seconds += row.metrics.get("perf/evaluate_seconds", 0.0)
        self._save_seconds += row.metrics.get("perf/save_seconds", 0.0)

    def seconds(self) -> float | None:
        """Until the last evaluation and save; None before the first window."""
        done = self._done - self._first_rollout
        if done == 0:
            return None
        saved = sum(map(self._is_saved, range(self._first_rollout + 1, self._done)))
        ahead = range(self._done + 1, self._num_rollouts + 1)
        evaluations = sum(map(self._is_evaluated, ahead)) + self._evaluation_is_next
        saves = sum(map(self._is_saved, range(self._done, self._num_rollouts + 1)))
        return (
            len(ahead) * self._window_seconds / done
            + evaluations * self._evaluate_seconds / max(self._evaluations, 1)
            + saves * self._save_seconds / max(saved, 1)
        )
