"""Evaluation: who is on the device, what is averaged, what is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import main_suite, records, run_config
from recording_phases import RecordingPhases

from unirl.algorithms.making import make_algorithm
from unirl.core.types import PromptBatch, PromptSuite
from unirl.residency.policy import Role
from unirl.tracking.evaluations import EvaluatedSample, evaluation_file, read_evaluation
from unirl.tracking.metrics import describe
from unirl.trainer.archive import EvaluationArchive
from unirl.trainer.evaluation import Evaluator, evaluation_metrics, film_strips
from unirl.trainer.requests import RequestFactory

ALL = tuple(Role)
ROUND = ["generate", "score", "judge"]


def evaluator(
    recording: RecordingPhases,
    run_dir: Path,
    *,
    suites: Sequence[PromptSuite] = (main_suite(5),),
    should_stop: Any = lambda: False,
    **overrides: Any,
) -> Evaluator:
    config = run_config({"eval_chunk_prompts": 2, **overrides})
    requests = RequestFactory(config, recording.model, make_algorithm(config.algorithm))
    return Evaluator(
        config,
        recording.phases,
        requests,
        suites,
        EvaluationArchive(run_dir, config),
        should_stop,
    )


def work(events: list[str]) -> list[str]:
    return [event for event in events if event in ROUND]


def test_progress_counts_the_prompts_of_all_suites(tmp_path):
    suites = (main_suite(5), PromptSuite("more", records(3), 1))
    noted: list[int] = []
    evaluator(RecordingPhases(ALL), tmp_path, suites=suites).run(
        0, sync_weights=False, note_progress=noted.append
    )
    assert noted == [2, 4, 5, 7, 8]


# --- residency ------------------------------------------------------------------------------------


def test_with_a_sync_each_chunk_wakes_pushes_and_sleeps_and_the_trainer_is_read_once(tmp_path):
    recording = RecordingPhases(ALL, engine_forgets=True)
    evaluator(recording, tmp_path).run(0, sync_weights=True)
    chunk = ["rollout onload", "push 0", "generate", "rollout offload", "reward onload", "score"]
    assert recording.events.take() == [
        *["reward offload", "extract", "train offload", *chunk, "judge"],
        *["reward offload", *chunk, "judge"],
        *["reward offload", *chunk, "judge"],
    ]


def test_without_a_sync_the_engine_stays_awake_through_all_chunks_and_sleeps_at_the_end(tmp_path):
    recording = RecordingPhases(ALL)
    evaluator(recording, tmp_path).run(0, sync_weights=False)
    events = recording.events.take()
    assert work(events) == ROUND * 3
    assert events.count("rollout onload") == events.count("rollout offload") == 1
    assert events[-1] == "rollout offload"
    assert "extract" not in events


def test_a_pinned_engine_is_never_put_to_sleep(tmp_path):
    recording = RecordingPhases([Role.TRAIN, Role.REWARD])
    evaluator(recording, tmp_path).run(0, sync_weights=True)
    assert "rollout offload" not in recording.events.take()


def test_a_failing_chunk_leaves_the_engine_asleep(tmp_path):
    recording = RecordingPhases(ALL)
    recording.events.failing = {"score": RuntimeError("broken")}
    with pytest.raises(RuntimeError, match="broken"):
        evaluator(recording, tmp_path).run(0, sync_weights=False)
    assert recording.events.take()[-1] == "rollout offload"


# --- numbers --------------------------------------------------------------------------------------


def test_means_are_over_all_samples_however_they_are_chunked(tmp_path):
    results = []
    for size in (1, 2, 5, 50):
        recording = RecordingPhases(ALL)
        run = evaluator(recording, tmp_path / str(size), eval_chunk_prompts=size)
        evaluation = run.run(0, sync_weights=True)
        assert evaluation is not None
        results.append(evaluation.metrics)
    for metrics in results:
        assert metrics == pytest.approx(results[0], rel=1e-3)
    assert results[0].keys() == {
        *("eval/reward_mean", "eval/reward_ci95"),
        *("eval/bright_mean", "eval/bright_ci95"),
        *("eval/judge_dark_mean", "eval/judge_dark_ci95"),
        "eval/num_samples",
    }
    assert results[0]["eval/num_samples"] == 5 * 2
    assert results[0]["eval/bright_mean"] + results[0]["eval/judge_dark_mean"] == pytest.approx(1)
    assert all(describe(name).meaning for name in results[0])


def test_the_same_weights_give_the_same_numbers_at_every_evaluation(tmp_path):
    recording = RecordingPhases(ALL)
    run = evaluator(recording, tmp_path, eval_rewards={"dark": {"path": "color"}})
    first, second = (run.run(step, sync_weights=True) for step in (0, 7))
    assert first is not None
    assert second is not None
    assert {**first.metrics, "eval/hacking_alarm_dark": 0.0} == second.metrics


def test_a_prompts_noise_does_not_depend_on_which_other_prompts_are_evaluated():
    factory = RequestFactory(
        run_config(), RecordingPhases(ALL).model, make_algorithm(run_config().algorithm)
    )
    whole = factory.evaluation(PromptBatch(records(4)), 2)
    part = factory.evaluation(PromptBatch(records(4)[2:3]), 2)
    assert whole.initial_noise_keys[4:6] == part.initial_noise_keys
    assert len(set(whole.initial_noise_keys)) == 8


def test_each_suite_is_sampled_and_scored_by_its_own_and_every_prompt_counts_once(tmp_path):
    recording = RecordingPhases(ALL)
    photos = PromptSuite("photos", records(6)[3:], samples_per_prompt=1)
    run = evaluator(recording, tmp_path, suites=[main_suite(5), photos])
    evaluation = run.run(0, sync_weights=True)
    assert evaluation is not None
    scored = [e for e in recording.events.take() if e.split()[0] in ("score", "judge")]
    assert scored == ["score", "judge"] * 3 + ["score photos"] * 2
    assert evaluation.metrics["eval/photos/reward_mean"] == pytest.approx(
        2 * evaluation.metrics["eval/photos/wild_mean"]
    )
    assert evaluation.metrics["eval/photos/num_samples"] == 3
    assert all(describe(name).meaning for name in evaluation.metrics)
    samples = read_evaluation(evaluation_file(tmp_path, "photos", 0))
    assert [s.text for s in samples] == [record.text for record in photos.records]
    assert all(s.scores.keys() == {"wild"} and not s.judges for s in samples)


def test_a_suite_changes_nothing_of_the_others(tmp_path):
    alone, beside = (
        evaluator(RecordingPhases(ALL), tmp_path / str(len(suites)), suites=suites)
        for suites in ([main_suite(5)], [main_suite(5), PromptSuite("photos", records(3), 2)])
    )
    one, two = alone.run(0, sync_weights=True), beside.run(0, sync_weights=True)
    assert one is not None
    assert two is not None
    assert one.metrics.items() < two.metrics.items()


# --- stopping and pictures ------------------------------------------------------------------------


@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_a_stop_ends_the_evaluation_without_a_result(tmp_path, stop_after):
    recording = RecordingPhases(ALL)
    answers = [False] * stop_after + [True]
    run = evaluator(recording, tmp_path, should_stop=lambda: answers.pop(0))
    assert run.run(0, sync_weights=True) is None
    assert work(recording.events.take()) == ROUND * stop_after
    assert not list(tmp_path.iterdir())


def test_every_sample_is_recorded_and_the_means_follow_from_the_records(tmp_path):
    recording = RecordingPhases(ALL)
    evaluation = evaluator(recording, tmp_path).run(3, sync_weights=True)
    assert evaluation is not None
    samples = read_evaluation(evaluation_file(tmp_path, "eval", 3))
    assert [(s.prompt, s.sample) for s in samples] == [(p, g) for p in range(5) for g in range(2)]
    assert [s.text for s in samples[::2]] == [record.text for record in records(6)[:5]]
    assert evaluation_metrics("eval", samples) == evaluation.metrics


def test_a_dropped_prompt_has_no_reward_and_counts_for_judges_only():
    kept = EvaluatedSample(0, "red cat", 0, 0.5, {"bright": 0.5}, {"dark": 1.0})
    dropped = EvaluatedSample(1, "blue dog", 0, None, {}, {"dark": 0.0})
    assert evaluation_metrics("eval", [kept, dropped]) == {
        "eval/reward_mean": 0.5,
        "eval/bright_mean": 0.5,
        "eval/judge_dark_mean": 0.5,
        "eval/judge_dark_ci95": pytest.approx(12.7062 / 2),
        "eval/num_samples": 1,
    }


def test_a_video_is_shown_by_its_first_middle_and_last_frame():
    frames = torch.arange(5, dtype=torch.uint8).view(1, 5, 1, 1, 1).expand(2, 5, 3, 4, 6)
    strip = film_strips(frames)
    assert strip.shape == (2, 3, 4, 18)
    assert strip[0, 0, 0].tolist() == [0] * 6 + [2] * 6 + [4] * 6
    assert film_strips(frames[:, :2]).shape == (2, 3, 4, 12)
    assert film_strips(frames[:, :1]).shape == (2, 3, 4, 6)
    images = frames[:, 0]
    assert film_strips(images) is images
