"""What a run writes down: a row per window and per evaluation, with what it cost so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unirl.core.types import ScoredRollout, UpdateStats
from unirl.distributed.ranks import Ranks
from unirl.tracking.tracker import Row, RowKind, Tracker
from unirl.trainer.clock import PhaseClock
from unirl.trainer.evaluation import Evaluation
from unirl.trainer.progress import Progress
from unirl.trainer.roles import MoveRecord
from unirl.trainer.window_metrics import rollout_metrics, train_metrics, trained_forwards


class Logbook:
    """Puts metrics together and hands them to the tracker. All ranks together."""

    def __init__(
        self,
        tracker: Tracker,
        transitions: MoveRecord,
        progress: Progress,
        clock: PhaseClock,
        ranks: Ranks,
    ) -> None:
        self._tracker = tracker
        self._transitions = transitions
        self._progress = progress
        self._clock = clock
        self._ranks = ranks

    def window(
        self,
        rollout_id: int,
        optimizer_step: int,
        scored: Sequence[ScoredRollout],
        updates: Sequence[UpdateStats],
    ) -> None:
        """The row of the window that ended with this rollout.

        Its seconds and moves are those since the last one: an evaluation and a save in between
        count here.
        """
        costs = self._clock.take_metrics() | self._transitions.take_metrics()
        metrics = rollout_metrics(scored) | train_metrics(updates) | costs
        num_samples = metrics["rollout/num_samples"]
        metrics["train/optimizer_step"] = float(optimizer_step)
        metrics["perf/samples_per_second"] = num_samples / metrics["perf/total_seconds"]
        forwards = sum(self._ranks.gather(trained_forwards(metrics)))
        self._progress.add_window(num_samples, forwards)
        self._log("rollout", rollout_id, optimizer_step, metrics)

    def evaluation(self, rollouts_done: int, optimizer_step: int, evaluation: Evaluation) -> None:
        """Its row and its pictures."""
        self._log("eval", rollouts_done, optimizer_step, evaluation.metrics)
        for panel in evaluation.panels:
            self._tracker.show(panel)

    def _log(
        self, kind: RowKind, rollout: int, optimizer_step: int, metrics: Mapping[str, float]
    ) -> None:
        metrics = {**metrics, **self._progress.metrics()}
        self._tracker.log(Row(kind, rollout, optimizer_step, metrics))
