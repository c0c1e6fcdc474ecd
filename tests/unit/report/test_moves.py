"""Moves: totals, lanes of one window, bytes over time."""

from __future__ import annotations

import json
from pathlib import Path

from report_runs import read_lines, write_moves, write_rows, write_run

from unirl.report.moves import moves
from unirl.report.reading import read_run


def test_a_component_is_on_the_device_between_its_moves(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    write_moves(path, 3)
    found = moves(read_run(path))
    assert found.timeline is not None
    phases, lane = found.timeline.lanes
    assert [span.label.split(",")[0] for span in phases.spans] == ["rollout", "train"]
    (stay,) = [span for span in lane.spans if not span.is_move]
    assert stay.start == 0
    assert 34 < stay.width < 35  # 1.04 of 3.04 seconds
    assert len(lane.spans) == 3


def test_totals_are_by_component(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    write_moves(path, 3)
    (line,) = moves(read_run(path)).traffic
    assert (line.onloads, line.offloads) == (3, 3)
    assert (line.to_device, line.to_host, line.dropped) == ("3.0 GiB", "0.0 MiB", "3.0 GiB")


def test_thousands_of_moves_are_drawn_by_their_extremes(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    write_moves(path, 2_000)
    held = moves(read_run(path)).held
    assert held is not None
    assert len(held.drawing.lines[0].points) <= 200
    assert held.drawing.lines[0].points[50].value == "1.0 GiB to 2.0 GiB"


def test_nothing_is_said_of_weights_in_training_before_a_window_was_trained_on(
    tmp_path: Path,
) -> None:
    path = write_run(tmp_path / "run")
    write_moves(path, 3)
    lines = [{**line, "component": None} for line in read_lines(path / "transitions.jsonl")]
    (path / "transitions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "through 6 changes of role" in moves(read_run(path)).summary
    write_rows(path, read_lines(path / "metrics.jsonl")[:1])
    assert moves(read_run(path)).summary == "Nothing was moved, and no window was trained on."


def test_a_run_that_moved_nothing_says_so(tmp_path: Path) -> None:
    found = moves(read_run(write_run(tmp_path / "run")))
    assert found.timeline is None
    assert "No moves were written down" in found.summary
