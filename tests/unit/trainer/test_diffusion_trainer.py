"""The loop: order of rollouts, steps, evaluations and saves, and what is logged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from builders import (
    CPU,
    host_arena,
    main_suite,
    records,
    run_config,
    same_bits,
    tiny_model,
    train_stack,
    transition_log,
    weights,
)
from recording_phases import RecordingPhases
from torch import Tensor

from unirl.algorithms.making import make_algorithm
from unirl.config.schema import RewardConfig
from unirl.core.errors import RewardError
from unirl.core.types import PromptRecord, ScoredRollout, UpdateStats
from unirl.data.stream import PromptStream
from unirl.distributed.ranks import OneRank
from unirl.residency.planner import ResidencyPlanner
from unirl.residency.policy import ResidencyPolicy, Role
from unirl.reward.scorer import Scorer
from unirl.reward.service import RewardService, WeightedScorer
from unirl.rollout.replica import ReplicaEngine
from unirl.rollout.trainside import TrainsideEngine
from unirl.tracking.metrics import describe
from unirl.tracking.tracker import Panel, Row, Sink, Tracker
from unirl.trainer.archive import EvaluationArchive
from unirl.trainer.clock import NoMeter, PhaseClock
from unirl.trainer.diffusion import DiffusionTrainer, TrainResult
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.phases import Phases
from unirl.trainer.progress import Progress
from unirl.trainer.requests import RequestFactory
from unirl.trainer.roles import AroundStep
from unirl.weight_sync.base import SharedWeights
from unirl.weight_sync.lora import LocalLoraSync

ALL = tuple(Role)


class RowList(Sink):
    """Keeps rows and names of panels."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.panels: list[str] = []

    def log(self, row: Row) -> None:
        self.rows.append(row)

    def show(self, panel: Panel) -> None:
        self.panels.append(panel.name)

    def close(self) -> None:
        return


class RecordingStack:
    """Counts windows instead of training."""

    def __init__(self, recording: RecordingPhases) -> None:
        self._recording = recording

    @property
    def weight_version(self) -> int:
        return self._recording.trainer.weight_version

    def update(self, scored: Sequence[ScoredRollout], around_step: AroundStep) -> list[UpdateStats]:
        self._recording.trainer.weight_version += 1  # first, as the train stack does it
        self._recording.events.add(f"step on {len(scored)}")
        return [UpdateStats({"loss": 0.0})]


class RecordingCheckpoints:
    read_the_device = True

    def __init__(self, recording: RecordingPhases, interval: int, last: int) -> None:
        self._recording = recording
        self._interval = interval
        self._last = last

    def is_due(self, done: int) -> bool:
        return self._interval > 0 and (done % self._interval == 0 or done == self._last)

    def evaluated(self, done: int, metrics: Mapping[str, float]) -> None:
        self._recording.events.add(f"evaluated {done}")

    def save(self, done: int) -> None:
        self._recording.events.add(f"save {done}")


class Run:
    """A loop around recording roles."""

    def __init__(
        self,
        folder: Path,
        parked: Sequence[Role] = ALL,
        should_stop: Callable[[], bool] = lambda: False,
        **overrides: Any,
    ) -> None:
        self.recording = RecordingPhases(parked)
        defaults = {"reward.scorers": {"bright": {"path": "jpeg_size"}}}
        self.config = config = run_config(
            defaults | {k.replace("__", "."): v for k, v in overrides.items()}
        )
        requests = RequestFactory(config, self.recording.model, make_algorithm(config.algorithm))
        self.rows = RowList()
        self.trainer = DiffusionTrainer(
            config,
            RecordingStack(self.recording),  # type: ignore[arg-type]
            self.recording.phases,
            PromptStream(records(6), config.batch_size, config.seed),
            requests,
            Evaluator(
                config,
                self.recording.phases,
                requests,
                [main_suite(2)],
                EvaluationArchive(folder, config),
                should_stop,
            ),
            RecordingCheckpoints(  # type: ignore[arg-type]
                self.recording, config.save_interval, config.num_rollouts
            ),
            Tracker([self.rows]),
            transition_log(folder),
            should_stop,
            Progress(config.num_devices),
        )

    def train(self, start: int = 0) -> TrainResult:
        return self.trainer.train(start)

    def events(self, *kinds: str) -> list[str]:
        """Events whose first word is one of `kinds`; all without any."""
        seen = self.recording.events.seen
        return [event for event in seen if not kinds or event.split()[0] in kinds]


def ended(result: TrainResult) -> tuple[int, bool]:
    """(rollouts done, interrupted)"""
    return result.rollouts_done, result.interrupted


# --- order ----------------------------------------------------------------------------------------


def test_a_baseline_comes_first_and_each_window_steps_evaluates_and_saves_in_that_order(tmp_path):
    run = Run(tmp_path, num_rollouts=4, eval_interval=2, save_interval=2)
    result = run.train()
    evaluation, rollout = ["generate", "score", "judge"], ["generate", "score", "step"]
    kinds = [e.split()[0] for e in run.events("generate", "score", "judge", "step", "save")]
    assert kinds == [
        *evaluation,
        *rollout,
        *rollout,
        *evaluation,
        "save",
        *rollout,
        *rollout,
        *evaluation,
        "save",
    ]
    assert run.events("save") == ["save 2", "save 4"]
    assert ended(result) == (4, False)
    assert [(row.kind, row.rollout) for row in run.rows.rows] == [
        ("eval", 0),
        ("rollout", 0),
        ("rollout", 1),
        ("eval", 2),
        ("rollout", 2),
        ("rollout", 3),
        ("eval", 4),
    ]


def test_without_evaluation_and_saving_there_are_only_rollouts(tmp_path):
    run = Run(tmp_path, num_rollouts=2)
    run.train()
    assert run.events("judge", "save") == []
    assert len(run.events("step")) == 2


def test_a_window_collects_its_rollouts_before_its_one_step(tmp_path):
    run = Run(tmp_path, num_rollouts=4, accumulate_rollouts=2)
    run.train()
    assert run.events("generate", "step") == ["generate", "generate", "step on 2"] * 2
    assert [row.rollout for row in run.rows.rows] == [1, 3]


def test_a_window_costs_one_round_trip_of_the_trainer(tmp_path):
    run = Run(tmp_path, num_rollouts=6, accumulate_rollouts=3, eval_interval=6)
    run.train()
    assert Counter(run.events("train")) == {"train offload": 3, "train onload": 2}
    assert run.events("extract") == ["extract"] * 3, "at the baseline and after each step"


def test_every_train_onload_is_directly_preceded_by_a_reward_offload(tmp_path):
    run = Run(tmp_path, num_rollouts=4, eval_interval=1, save_interval=2, eval_chunk_prompts=1)
    run.train()
    moves = [e for e in run.events("train", "rollout", "reward") if e.split()[1] != "generate"]
    before = [moves[i - 1] for i, move in enumerate(moves) if move == "train onload"]
    assert before
    assert set(before) == {"reward offload"}


def test_a_window_that_is_not_saved_pays_no_onload_for_it(tmp_path):
    def train_onloads(**overrides: Any) -> int:
        run = Run(tmp_path, num_rollouts=4, eval_interval=1, **overrides)
        run.train()
        return run.events("train").count("train onload")

    # Each evaluation parks the trainer again; only a save that follows brings it back.
    assert train_onloads() == 4
    assert train_onloads(save_interval=2) == 6
    assert train_onloads(save_interval=1) == 8


# --- weight sync ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "start", "pushed"),
    [(1, 0, [None, 1, 2, 3]), (2, 0, [None, None, 2, 2]), (2, 1, [0, 1, 1]), (9, 3, [0])],
)
def test_weights_are_pushed_on_schedule_and_after_a_resume(tmp_path, interval, start, pushed):
    run = Run(tmp_path, num_rollouts=4, weight_sync_interval=interval)
    held: list[int | None] = []
    generate = run.recording.engine.generate

    def spy(request: Any) -> Any:
        held.append(request.weight_version)
        return generate(request)

    run.recording.engine.generate = spy  # type: ignore[method-assign]
    run.train(start)
    assert held == pushed


def test_a_step_that_raises_leaves_no_stale_adapter_in_the_cache(tmp_path):
    run = Run(tmp_path, num_rollouts=3)
    run.recording.events.failing = {"step on 1": RuntimeError("halfway")}
    run.recording.phases._stage_adapter()
    sync: Any = run.recording.sync
    assert sync.has_staged_adapter()
    with pytest.raises(RuntimeError, match="halfway"):
        run.train()
    assert not sync.has_staged_adapter()


# --- stopping -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("save_interval", "stop_after", "saves"),
    [(0, 2, ["save 2"]), (2, 2, ["save 2"]), (2, 3, ["save 2", "save 3"]), (0, 0, [])],
)
def test_a_stop_between_windows_saves_once_what_was_done(
    tmp_path, save_interval, stop_after, saves
):
    run = Run(
        tmp_path,
        num_rollouts=5,
        save_interval=save_interval,
        should_stop=lambda: len(run.events("step")) >= stop_after,
    )
    assert ended(run.train()) == (stop_after, True)
    assert run.events("save") == saves


def test_a_stop_during_an_evaluation_drops_it_and_saves(tmp_path):
    run = Run(
        tmp_path,
        num_rollouts=4,
        eval_interval=2,
        eval_chunk_prompts=1,
        should_stop=lambda: len(run.events("step")) == 2,
    )
    assert ended(run.train()) == (2, True)
    assert [row.kind for row in run.rows.rows] == ["eval", "rollout", "rollout"]
    assert run.events("save") == ["save 2"]


@pytest.mark.parametrize("stop_at", ["generate", "score"])
def test_a_stop_within_a_window_ends_after_the_phase_and_drops_the_window(tmp_path, stop_at):
    run = Run(
        tmp_path,
        num_rollouts=6,
        accumulate_rollouts=2,
        should_stop=lambda: len(run.events(stop_at)) == 3,
    )
    assert ended(run.train()) == (2, True)
    assert len(run.events("generate")) == 3
    assert len(run.events("score")) == (2 if stop_at == "generate" else 3)
    assert run.events("step", "save") == ["step on 2", "save 2"]
    assert [row.rollout for row in run.rows.rows] == [1]


def fail_when(run: Run, is_time: Callable[[str], bool], message: str) -> None:
    """From now on events at that time raise."""
    events, add = run.recording.events, run.recording.events.add

    def failing_add(event: str) -> None:
        if is_time(event):
            raise RewardError(message)
        add(event)

    events.add = failing_add  # type: ignore[method-assign]


@pytest.mark.parametrize("failing", ["generate", "score"])
def test_a_failure_outside_of_a_step_saves_what_is_trained(tmp_path, failing):
    run = Run(tmp_path, num_rollouts=4)

    fail_when(run, lambda event: event == failing and len(run.events("step")) == 2, "outage")
    with pytest.raises(RewardError, match="outage"):
        run.train()
    assert run.events("save") == ["save 2"]


def test_a_failure_after_a_save_saves_nothing_again(tmp_path):
    run = Run(tmp_path, num_rollouts=4, save_interval=1)
    fail_when(run, lambda event: event == "generate" and bool(run.events("save")), "outage")
    with pytest.raises(RewardError, match="outage"):
        run.train()
    assert run.events("save") == ["save 1"]


def test_weights_that_a_step_tore_are_not_saved(tmp_path):
    run = Run(tmp_path, num_rollouts=4)
    fail_when(run, lambda event: "step" in event and len(run.events("step")) == 2, "halfway")
    with pytest.raises(RewardError, match="halfway"):
        run.train()
    assert run.events("save") == []


def test_a_resume_evaluates_only_where_the_unbroken_run_would(tmp_path):
    run = Run(tmp_path, num_rollouts=6, eval_interval=3)
    run.train(start=2)
    assert [row.rollout for row in run.rows.rows if row.kind == "eval"] == [3, 6]


def test_a_finished_run_that_is_resumed_only_evaluates(tmp_path):
    run = Run(tmp_path, num_rollouts=3, eval_interval=1)
    assert ended(run.train(start=3)) == (3, False)
    assert run.events("step") == []


# --- real roles -----------------------------------------------------------------------------------


class Brightness(Scorer):
    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        return images.float().mean(dim=(1, 2, 3)) / 255


class RealRun:
    """A whole small run with real roles on the tiny model."""

    def __init__(
        self, folder: Path, *, replica: bool, parked: Sequence[Role] = (), **overrides: Any
    ) -> None:
        folder.mkdir()
        settings = {
            "num_rollouts": 3,
            "eval_interval": 3,
            "stack.optimizer.learning_rate": 3e-3,
            "reward.scorers": {"bright": {"path": "jpeg_size"}},
        }
        config = run_config(settings | {k.replace("__", "."): v for k, v in overrides.items()})
        self.model = tiny_model()
        stack = train_stack(self.model, settings)
        reward = RewardService(
            {"bright": WeightedScorer(Brightness(), 1.0)},
            {"judge": Brightness()},
            RewardConfig(),
            host_arena(),
        )
        components = {Role.REWARD: reward.parts}
        if replica:
            rollout_model = tiny_model()
            rollout_model.network.requires_grad_(False)
            engine: Any = ReplicaEngine(rollout_model, 0, CPU, host_arena(), None)
            sync: Any = LocalLoraSync(stack.weights, engine, verify=True)
            components[Role.TRAIN] = stack.parts
        else:
            engine = TrainsideEngine(self.model, 0, CPU, lambda: stack.weight_version, nullcontext)
            sync = SharedWeights(stack)
        components[Role.ROLLOUT] = engine.parts
        self.log = transition_log(folder)
        residency = ResidencyPlanner(
            ResidencyPolicy(*(role not in parked for role in ALL)),
            components,
            self.log.record,
            OneRank().barrier,
        )
        phases = Phases(engine, reward, sync, residency, PhaseClock(NoMeter()), OneRank())
        requests = RequestFactory(config, self.model, make_algorithm(config.algorithm))
        self.sink = RowList()
        trainer = DiffusionTrainer(
            config,
            stack,
            phases,
            PromptStream(records(6), config.batch_size, config.seed),
            requests,
            Evaluator(
                config,
                phases,
                requests,
                [main_suite(2)],
                EvaluationArchive(folder, config),
                lambda: False,
            ),
            NoCheckpoints(),  # type: ignore[arg-type]
            Tracker([self.sink]),
            self.log,
            lambda: False,
            Progress(config.num_devices),
        )
        trainer.train(0)
        residency.enter(Role.TRAIN)

    def learned(self) -> list[dict[str, float]]:
        """All metrics but costs."""
        costs = ("perf/", "residency/", "progress/")
        return [
            {name: value for name, value in row.metrics.items() if not name.startswith(costs)}
            for row in self.sink.rows
        ]


class NoCheckpoints:
    read_the_device = True

    def is_due(self, done: int) -> bool:
        return False

    def evaluated(self, done: int, metrics: Mapping[str, float]) -> None:
        return


@pytest.mark.parametrize("replica", [False, True])
@pytest.mark.parametrize("window", [1, 3])
def test_every_logged_metric_is_in_the_catalogue_and_finite(tmp_path, replica, window):
    run = RealRun(tmp_path / "run", replica=replica, parked=ALL, accumulate_rollouts=window)
    kinds = Counter(row.kind for row in run.sink.rows)
    assert kinds == {"eval": 2, "rollout": 3 // window}
    for row in run.sink.rows:
        for name, value in row.metrics.items():
            assert describe(name).meaning
            assert math.isfinite(value), name
    first = next(row for row in run.sink.rows if row.kind == "rollout").metrics
    assert first["rollout/num_samples"] == 16 * window
    assert first["train/optimizer_step"] == 1
    assert first["train/ratio_min"] == first["train/ratio_max"] == 1


def test_parked_and_resident_roles_train_to_the_same_bits(tmp_path):
    runs = [
        RealRun(tmp_path / str(i), replica=True, parked=parked)
        for i, parked in enumerate(([], ALL, [Role.TRAIN], [Role.ROLLOUT]))
    ]
    for other in runs[1:]:
        assert same_bits(weights(other.model), weights(runs[0].model))
        assert other.learned() == runs[0].learned()


def test_a_replica_that_is_synced_each_rollout_trains_like_shared_weights(tmp_path):
    shared = RealRun(tmp_path / "shared", replica=False)
    replica = RealRun(tmp_path / "replica", replica=True)
    assert same_bits(weights(shared.model), weights(replica.model))
    assert shared.learned() == replica.learned()


def test_training_changes_the_weights(tmp_path):
    run = RealRun(tmp_path / "run", replica=False)
    assert not same_bits(weights(run.model), weights(tiny_model()))
