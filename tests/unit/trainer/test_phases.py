"""Order of moves, reads, pushes and calls in the phases of a rollout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import rollout_request
from recording_phases import RecordingPhases

from unirl.core.errors import RewardError
from unirl.residency.policy import Role

ALL = tuple(Role)
REQUEST = rollout_request(weight_version=None)


def after_a_step(parked, **options) -> RecordingPhases:
    """Phases after a first rollout and a step, so that a sync is needed."""
    recording = RecordingPhases(parked, **options)
    run_rollout(recording, sync=False)
    recording.events.take()
    return recording


def run_rollout(recording: RecordingPhases, sync: bool) -> None:
    rollout = recording.phases.generate(REQUEST, sync_weights=sync)
    recording.phases.score(rollout.request, rollout)
    recording.step()


def test_all_parked_each_role_is_alone_on_the_device_when_it_works():
    recording = RecordingPhases(ALL)
    run_rollout(recording, sync=False)
    assert recording.events.take() == [
        "train offload",
        "reward offload",
        "rollout onload",
        "generate",
        "rollout offload",
        "reward onload",
        "score",
        "reward offload",
        "train onload",
        "step",
    ]


def test_a_parked_trainer_is_read_before_it_leaves():
    recording = after_a_step(ALL)
    run_rollout(recording, sync=True)
    assert recording.events.take() == [
        "extract",
        "train offload",
        "rollout onload",
        "push 1",
        "generate",
        "rollout offload",
        "reward onload",
        "score",
        "reward offload",
        "train onload",
        "step",
    ]


def test_a_parked_trainer_is_read_from_the_host_and_nothing_moves_for_it():
    recording = after_a_step(ALL)
    rollout = recording.phases.generate(REQUEST, sync_weights=False)
    recording.phases.score(rollout.request, rollout)
    recording.events.take()
    recording.phases.generate(REQUEST, sync_weights=True)
    assert recording.events.take() == [
        "extract",
        "reward offload",
        "rollout onload",
        "push 1",
        "generate",
        "rollout offload",
    ]


def test_a_parked_trainer_in_shards_comes_back_to_be_read_once_the_reward_left():
    recording = after_a_step(ALL, readable_while_parked=False)
    rollout = recording.phases.generate(REQUEST, sync_weights=False)
    recording.phases.score(rollout.request, rollout)
    recording.events.take()
    recording.phases.generate(REQUEST, sync_weights=True)
    assert recording.events.take() == [
        "reward offload",
        "train onload",
        "extract",
        "train offload",
        "rollout onload",
        "push 1",
        "generate",
        "rollout offload",
    ]


def test_a_staged_adapter_is_pushed_again_without_the_trainer():
    recording = after_a_step(ALL, engine_forgets=True)
    for number in range(3):
        recording.phases.generate(REQUEST, sync_weights=True)
        events = recording.events.take()
        assert ("extract" in events) == (number == 0)
        assert events[-4:] == ["rollout onload", "push 1", "generate", "rollout offload"]
    run_rollout(recording, sync=True)
    recording.events.take()
    recording.phases.generate(REQUEST, sync_weights=True)
    assert recording.events.take()[0] == "extract", "a step makes the cache invalid"


def test_an_engine_that_keeps_its_adapter_is_not_pushed_the_same_one_twice():
    recording = after_a_step(ALL)
    recording.phases.generate(REQUEST, sync_weights=True)
    recording.events.take()
    recording.phases.generate(REQUEST, sync_weights=True)
    assert recording.events.take() == ["rollout onload", "generate", "rollout offload"]


@pytest.mark.parametrize("full_sync", [False, True])
def test_a_resident_trainer_is_read_beside_the_engine(full_sync):
    recording = after_a_step([Role.ROLLOUT], full_sync=full_sync)
    run_rollout(recording, sync=True)
    assert recording.events.take() == [
        "rollout onload",
        "extract",
        "push 1",
        "generate",
        "rollout offload",
        "score",
        "step",
    ]


def test_without_a_sync_stale_weights_are_sampled_as_published():
    recording = after_a_step([Role.ROLLOUT])
    run_rollout(recording, sync=True)
    recording.events.take()
    rollout = recording.phases.generate(REQUEST, sync_weights=False)
    assert rollout.request.weight_version == 1
    assert recording.trainer.weight_version == 2
    assert recording.events.take() == ["rollout onload", "generate", "rollout offload"]


def test_keep_awake_leaves_the_engine_on_the_device_through_the_reward_phase():
    recording = RecordingPhases(ALL)
    rollout = recording.phases.generate(REQUEST, sync_weights=False, keep_awake=True)
    recording.phases.score(rollout.request, rollout, preserve=[Role.ROLLOUT])
    events = recording.events.take()
    assert "rollout offload" not in events
    assert events[-2:] == ["reward onload", "score"]


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_awake", [False, True])
@pytest.mark.parametrize("failing", ["generate", "push 1"])
def test_a_failed_generate_puts_the_engine_to_sleep(keep_awake, failing):
    recording = after_a_step(ALL)
    recording.events.failing = {failing: RuntimeError("out of memory")}
    with pytest.raises(RuntimeError, match="out of memory"):
        recording.phases.generate(REQUEST, sync_weights=True, keep_awake=keep_awake)
    assert recording.events.take()[-1] == "rollout offload"
    recording.events.failing = {}
    recording.phases.generate(REQUEST, sync_weights=True)


def test_a_failed_generate_leaves_a_pinned_engine_awake():
    recording = RecordingPhases([Role.TRAIN, Role.REWARD])
    recording.events.failing = {"generate": RuntimeError("out of memory")}
    with pytest.raises(RuntimeError):
        recording.phases.generate(REQUEST, sync_weights=False)
    assert recording.events.take() == ["train offload", "reward offload", "rollout onload"]


def test_an_interrupt_puts_the_engine_to_sleep_too():
    recording = RecordingPhases(ALL)
    recording.events.failing = {"generate": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        recording.phases.generate(REQUEST, sync_weights=False)
    assert recording.events.take()[-1] == "rollout offload"


def test_a_second_failure_is_noted_and_does_not_hide_the_first():
    recording = RecordingPhases(ALL)
    recording.events.failing = {
        "generate": RuntimeError("out of memory"),
        "rollout offload": OSError("stuck"),
    }
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        recording.phases.generate(REQUEST, sync_weights=False)
    assert caught.value.__notes__ == ["putting the rollout engine to sleep failed too: stuck"]


def test_a_failed_read_leaves_no_cache():
    recording = after_a_step(ALL)
    recording.events.failing = {"extract": RuntimeError("lost")}
    with pytest.raises(RuntimeError, match="lost"):
        recording.phases.generate(REQUEST, sync_weights=True)
    recording.events.failing = {}
    recording.events.take()
    recording.phases.generate(REQUEST, sync_weights=True)
    assert recording.events.take()[0] == "extract"


def test_a_rollout_without_any_group_left_is_an_error(monkeypatch: pytest.MonkeyPatch):
    recording = RecordingPhases(ALL)
    rollout = recording.phases.generate(REQUEST, sync_weights=False)
    scored = recording.phases.score(rollout.request, rollout)
    dropped = replace(scored, valid=torch.zeros_like(scored.valid))
    monkeypatch.setattr(recording.phases.reward, "score", lambda rollout: dropped)
    with pytest.raises(RewardError, match="every prompt group"):
        recording.phases.score(rollout.request, rollout)


def test_each_phase_is_timed_also_when_it_fails():
    recording = RecordingPhases(ALL)
    recording.events.failing = {"score": RuntimeError("broken")}
    rollout = recording.phases.generate(REQUEST, sync_weights=False)
    with pytest.raises(RuntimeError, match="broken"):
        recording.phases.score(rollout.request, rollout)
    metrics = recording.phases.clock.take_metrics()
    assert {"perf/rollout_seconds", "perf/reward_seconds"} <= metrics.keys()
    assert all(value > 0 for value in metrics.values())
    assert recording.phases.clock.take_metrics() == {}
