"""Curves: what they run over, what is shown of one run, of seeds and of suites."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_runs import read_lines, write_rows, write_run

from unirl.report.learning import View, views
from unirl.report.reading import read_run
from unirl.report.shown import families
from unirl.tracking.evaluations import note_changes


def views_of(*paths: Path) -> list[View]:
    return views(families([read_run(path) for path in paths]))


def test_there_is_a_view_for_each_cost_that_all_runs_have(tmp_path: Path) -> None:
    one, other = (write_run(tmp_path / name) for name in ("a", "b"))
    names = ["Rollouts", "Wall time", "Device time", "Images", "Denoiser evaluations"]
    assert [view.name for view in views_of(one, other)] == names
    rows = [
        {k: v for k, v in r.items() if k != "progress/images"}
        for r in read_lines(other / "metrics.jsonl")
    ]
    write_rows(other, rows)
    assert "Images" not in [view.name for view in views_of(one, other)]


def test_evaluations_stand_at_what_the_run_had_cost_by_then(tmp_path: Path) -> None:
    over_rollouts, over_time, *_ = views_of(write_run(tmp_path / "run"))
    assert over_rollouts.heldout is not None
    assert over_time.heldout is not None
    (line,) = over_rollouts.heldout.drawing.lines
    assert [point.x for point in line.points] == [f"{n} rollouts" for n in (0, 4, 8, 12)]
    (line,) = over_time.heldout.drawing.lines
    assert [point.x for point in line.points] == ["2.0 s", "36 s", "1 min 10 s", "1 min 44 s"]


def test_judges_are_dashed_and_come_after_the_scores(tmp_path: Path) -> None:
    scores = views_of(write_run(tmp_path / "run"))[0].scores
    assert [score.title for score in scores] == ["ocr", "exact read"]
    assert [score.drawing.lines[0].dashed for score in scores] == [False, True]
    assert [score.value for score in scores] == ["0.500 → 0.800", "0.200 → 0.350"]


def test_one_evaluation_is_one_number(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", num_rollouts=3)
    assert [score.value for score in views_of(path)[0].scores] == ["0.500", "0.200"]


def test_a_curve_keeps_what_cannot_be_compared_behind_a_rule(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    note_changes(path, 8, ["seed: 0 -> 3"])
    for view in views_of(path):
        assert view.heldout is not None
        drawing = view.heldout.drawing
        assert len(drawing.lines[0].points) == 4
        (rule,) = drawing.rules
        assert drawing.lines[0].points[1].place < rule < drawing.lines[0].points[2].place
        assert "From rollout 8 on it was evaluated otherwise: seed: 0 → 3." in view.heldout.sentence
        assert "same noise" not in view.heldout.sentence
        assert view.scores[0].value == "0.700 → 0.800"


def test_runs_that_were_evaluated_with_other_noise_are_not_said_to_have_the_same(
    tmp_path: Path,
) -> None:
    for seed, same in ((0, True), (1, False)):
        paths = [write_run(tmp_path / f"{seed}" / name, seed=seed * (name == "b")) for name in "ab"]
        heldout = views_of(*paths)[0].heldout
        assert heldout is not None
        assert ("with the same noise" in heldout.sentence) == same


def test_suites_come_last_with_their_intervals(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    suite = {"eval/hard/reward_mean": 0.2, "eval/hard/reward_ci95": 0.05}
    rows = [
        {**row, **(suite if row["kind"] == "eval" else {})}
        for row in read_lines(path / "metrics.jsonl")
    ]
    write_rows(path, rows)
    last = views_of(path)[0].scores[-1]
    assert last.title == "hard: reward"
    assert last.drawing.lines[0].points[0].value == "0.200 ± 0.050"


@pytest.mark.parametrize(("num_rollouts", "num_lines"), [(12, 1), (200, 2)])
def test_many_windows_get_a_running_mean_before_them(
    tmp_path: Path, num_rollouts: int, num_lines: int
) -> None:
    training = views_of(write_run(tmp_path / "run", num_rollouts=num_rollouts))[0].training
    assert training is not None
    assert len(training.drawing.lines) == num_lines
    assert training.drawing.lines[-1].band
    assert ("running mean over" in training.sentence) == (num_lines == 2)


def test_seeds_have_a_mean_with_a_band_and_each_a_thin_line(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / f"run-{s}", seed=s, gain=0.2 + 0.1 * s) for s in range(3)]
    heldout = views_of(*paths)[0].heldout
    assert heldout is not None
    *thin, mean = heldout.drawing.lines
    assert [line.pale for line in thin] == [True] * 3
    assert mean.band
    assert mean.points[-1].value == "0.700 ± 0.100"


def test_without_prompts_of_their_own_evaluations_are_not_called_held_out(tmp_path: Path) -> None:
    apart = {"data": {"eval": "pkg:numbers/heldout.jsonl"}}
    for name, config, title in (
        ("same", {}, "Reward at evaluation"),
        ("apart", apart, "Held-out reward"),
    ):
        heldout = views_of(write_run(tmp_path / name, config=config))[0].heldout
        assert heldout is not None
        assert heldout.title == title
        assert ("never sees" in heldout.sentence) == (name == "apart")
