"""What a plan, a trace and the metrics say of moves that overlap."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import transition_log

from unirl.cli.compose import compose_and_check
from unirl.core.components import Moved
from unirl.core.errors import ConfigError
from unirl.planning.hardware import make_target
from unirl.planning.plan import Plan, make_plan
from unirl.planning.remedy import RememberedWorkspace
from unirl.planning.report import text
from unirl.residency.directory import State
from unirl.residency.perfetto import planned_events
from unirl.residency.plan import Line, Traffic, handoffs, seconds_of, transition_text, transitions
from unirl.residency.policy import Role
from unirl.residency.timeline import PhaseKind
from unirl.residency.transition import ComponentMove, MoveRule, Transition
from unirl.runtime.loop import _budget_bytes, overlap_bytes

GATE = "diffusion/tiny/tiny_residency_gate"
ESTIMATE = RememberedWorkspace()


def line(transition: int, move: str, moved: int, rule: str = "overlap") -> Line:
    return {
        "transition": transition,
        "role": "train" if move == "offload" else "rollout",
        "move": move,
        "cause": "enter rollout",
        "rule": rule,
        "component": f"part{transition}",
        "from": "resident",
        "to": "parked",
        "version": "0",
        "moved_bytes": moved,
        "dropped_bytes": 0,
        "device_bytes": 100,
        "host_bytes": 0,
    }


# --- seconds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "inward", "seconds"),
    [(100, 0, 10), (0, 100, 10), (100, 10, 10), (100, 100, 20 / 1.4), (60, 80, 14 / 1.4)],
)
def test_both_ways_at_once_take_the_longer_or_all_at_a_link_1_4_times_as_fast(
    out: int, inward: int, seconds: float
) -> None:
    moved = Traffic(onload_bytes=inward, offload_bytes=out, dropped_bytes=0)
    assert moved.overlapped_seconds(10, 10) == pytest.approx(seconds)
    assert moved.overlapped_seconds(10, 10) <= moved.seconds(10, 10)


def test_a_handoff_ends_with_its_onload_and_others_stand_alone() -> None:
    lines = [
        line(1, "offload", 10, "release first"),
        line(2, "onload", 10, "release first"),
        line(3, "offload", 10),
        line(4, "offload", 20),
        line(5, "onload", 30),
        line(6, "offload", 10),
        line(7, "onload", 10),
    ]
    numbers = [[one["transition"] for one in group] for group in handoffs(lines)]
    assert numbers == [[1], [2], [3, 4, 5], [6, 7]]
    assert seconds_of(lines, 1, 1) == pytest.approx(20 + 60 / 1.4 + 20 / 1.4)


# --- plans ----------------------------------------------------------------------------------------


def plan_of(*overrides: str, budget_mib: float | None = 1024) -> Plan:
    config, problems = compose_and_check(GATE, ["~eval_rewards", *overrides])
    assert not problems
    target = make_target(config, budget_gib=None if budget_mib is None else budget_mib / 1024)
    return make_plan(config, target, ((), ()), 3, ESTIMATE)


def named(plan: Plan) -> list[str]:
    return [transition_text(group) for group in transitions(plan.notes.lines)]


OVERLAP = "overlap_moves=true"


def test_an_overlapped_plan_moves_the_same_with_a_higher_peak_in_less_time() -> None:
    plain, both = plan_of("device_budget_gib=1"), plan_of(OVERLAP, "device_budget_gib=1")
    assert named(both) == named(plain)
    assert both.window_traffic == plain.window_traffic
    peaks = [max(line.get("device_bytes", 0) for line in p.notes.lines) for p in (plain, both)]
    assert peaks[0] < peaks[1] <= 2**30
    assert both.window_seconds < plain.window_seconds
    assert {line["rule"] for line in plain.notes.lines} == {"release first"}
    assert [peak.total_bytes for peak in both.peaks] == [p.total_bytes for p in plain.peaks]


def test_the_union_is_both_sides_to_the_byte() -> None:
    plan = plan_of(OVERLAP, "device_budget_gib=1")
    sizes = {name: part.num_bytes() for name, part in plan.notes.parts.items()}
    leaving = [one for one in plan.window if one["rule"] == "overlap" and one["move"] == "offload"]
    assert {one["role"] for one in leaving} == {"train"}
    there = sum(size for name, size in sizes.items() if name.split(".")[0] in ("train", "rollout"))
    assert {one["device_bytes"] for one in leaving} == {there}


def unions(plan: Plan) -> list[int]:
    """Bytes on the device while both sides are there, of each overlapped move off it."""
    late = (one for one in plan.notes.lines if one["rule"] == "overlap" and one["component"])
    return [one["device_bytes"] for one in late if one["move"] == "offload"]


def test_a_byte_less_than_both_sides_need_releases_first() -> None:
    largest = max(unions(plan_of(OVERLAP, "device_budget_gib=1")))
    kept = plan_of().needed[PhaseKind.REWARD]
    enough, short = (
        plan_of(OVERLAP, "device_budget_gib=1", budget_mib=(largest + kept - less) / 2**20)
        for less in (0, 1)
    )
    assert max(unions(enough)) == largest
    assert max(unions(short), default=0) < largest
    assert named(short) == named(enough)


def test_the_text_names_the_rule_and_the_fullest_moment() -> None:
    told = text(plan_of(OVERLAP, "device_budget_gib=1"), GATE)
    assert " out; overlap" in told or "freed; overlap" in told
    assert "while both sides are there, " in told
    assert "overlap" not in text(plan_of(), GATE)
    config_only = plan_of(OVERLAP, "device_budget_gib=1", "train_resident=true")
    assert "overlap          nowhere" in text(config_only, GATE)


# --- refusals -------------------------------------------------------------------------------------


def test_a_cpu_without_a_budget_is_refused() -> None:
    _, problems = compose_and_check(GATE, [OVERLAP, "device=cpu"])
    assert [problem.key for problem in problems] == ["overlap_moves"]
    assert "Set device_budget_gib, or overlap_moves=false." in str(problems[0])
    for fine in (["device=cpu", "device_budget_gib=1"], ["device=cuda"]):
        assert not compose_and_check(GATE, [OVERLAP, *fine])[1]


def test_a_device_that_turns_out_to_be_a_cpu_is_refused_before_anything_loads() -> None:
    config, _ = compose_and_check(GATE, [OVERLAP])
    config = config.model_copy(update={"device": "cpu"})
    with pytest.raises(ConfigError, match=r"overlap_moves=true needs .* or overlap_moves=false"):
        _budget_bytes(config)


def test_without_the_key_nothing_overlaps() -> None:
    plan = plan_of("device_budget_gib=1")
    assert overlap_bytes(plan.config, plan.problem) is None
    asked = plan.config.model_copy(update={"overlap_moves": True})
    kept = plan.needed[PhaseKind.REWARD]
    assert overlap_bytes(asked, plan.problem) == 2**30 - kept
    assert kept > 0


# --- traces and metrics ---------------------------------------------------------------------------


def slices(events: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Start and length of each slice, in seconds."""
    return {
        event["name"].split()[0]: (event["ts"] / 1e6, event["dur"] / 1e6)
        for event in events
        if event["ph"] == "X" and event["tid"] != 1
    }


def test_a_planned_trace_draws_both_sides_at_one_time() -> None:
    plan = plan_of(OVERLAP, "device_budget_gib=1")
    rates = {"onload": 10.0, "offload": 10.0}
    lines = [line(1, "offload", 20), line(2, "offload", 40), line(3, "onload", 80)]
    note = plan.notes.phases[0]
    notes = [type(note)(note.kind, 0, 3, {}, {})]
    events = list(planned_events(notes, lines, rates, plan.needed, None))
    found = slices(events)
    whole = 14 / 1.4
    assert found["part1"] == pytest.approx((0, whole / 3))
    assert found["part2"] == pytest.approx((whole / 3, whole * 2 / 3))
    assert found["part3"] == pytest.approx((0, whole))
    phase = next(e for e in events if e["ph"] == "X" and e["tid"] == 1)
    assert phase["ts"] / 1e6 == pytest.approx(whole)


def overlapped(seq: int, role: Role, to_device: bool, moved: int, seconds: float) -> Transition:
    away, here = State.PARKED, State.RESIDENT
    move = ComponentMove(
        component=f"{role.value}.part",
        source=away if to_device else here,
        target=here if to_device else away,
        moved=Moved(moved),
        seconds=seconds,
        version="0",
        device_bytes=7,
        host_bytes=0,
    )
    return Transition(seq, role, to_device, "enter rollout", (move,), seconds, MoveRule.OVERLAP)


def handoff() -> list[Transition]:
    """Of 3 seconds."""
    return [
        overlapped(1, Role.TRAIN, False, 20, 2.0),
        overlapped(2, Role.REWARD, False, 10, 1.0),
        overlapped(3, Role.ROLLOUT, True, 90, 3.0),
    ]


def test_time_that_was_shared_is_counted_once(tmp_path) -> None:
    log = transition_log(tmp_path)
    for transition in handoff():
        log.record(transition)
    metrics = log.take_metrics()
    log.close()
    assert metrics["residency/seconds"] == metrics["residency/for_rollout_seconds"] == 3.0
    assert metrics["residency/offload_gb_per_second"] == pytest.approx(30 / 3 / 1e9)
    assert metrics["residency/onload_gb_per_second"] == pytest.approx(90 / 3 / 1e9)
    assert metrics["residency/for_rollout_gb_per_second"] == pytest.approx(120 / 3 / 1e9)


def test_a_runs_trace_draws_both_sides_at_one_time(tmp_path) -> None:
    log = transition_log(tmp_path)
    for transition in handoff():
        log.record(transition)
    log.close()
    events = json.loads((tmp_path / "trace.json").read_text().rstrip().rstrip(",") + "]")
    found = slices(events)
    start, length = found["rollout.part"]
    assert length == 3.0
    assert found["train.part"] == pytest.approx((start, 2.0), abs=0.2)
    assert found["reward.part"] == pytest.approx((start + 2.0, 1.0), abs=0.2)
    assert all(e["args"]["rule"] == "overlap" for e in events if e["ph"] == "X")
