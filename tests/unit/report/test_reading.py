"""A run directory in any state becomes values and notes; a folder that is no run is an error."""

from __future__ import annotations

import fcntl
import math
from pathlib import Path

import pytest
from report_runs import read_lines, write_log, write_rows, write_run, write_sessions

from unirl.core.errors import UnirlError
from unirl.report.outcome import outcome_of
from unirl.report.reading import read_run
from unirl.report.warnings import warned


def test_a_whole_run_is_read_without_a_note(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "whole"))
    assert run.notes == ()
    assert [row.rollout for row in run.of_kind("rollout")] == list(range(12))
    assert [evaluation.step for evaluation in run.evaluations] == [0, 12]
    assert outcome_of(run).state == "finished"


def test_a_last_line_cut_by_a_kill_is_left_out_with_a_note(tmp_path: Path) -> None:
    path = write_run(tmp_path / "cut")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "rollout", "rollout": 12, "opt')
    run = read_run(path)
    assert len(run.of_kind("rollout")) == 12
    assert ["cut off" in note for note in run.notes] == [True]


def test_nan_written_as_text_is_a_number_again(tmp_path: Path) -> None:
    path = write_run(tmp_path / "nan")
    rows = read_lines(path / "metrics.jsonl")
    rows[-1]["eval/reward_mean"] = math.nan
    write_rows(path, rows)
    assert math.isnan(read_run(path).rows[-1].metrics["eval/reward_mean"])


def test_what_a_resume_set_aside_is_not_read(tmp_path: Path) -> None:
    path = write_run(tmp_path / "resumed")
    (path / "metrics.jsonl.before-resume-4").write_text('{"kind": "rollout", "rollout": 99}\n')
    aside = path / "evaluations" / "before-resume-4"
    aside.mkdir()
    (aside / "eval-000099.jsonl").write_text("{}\n")
    run = read_run(path)
    assert max(row.rollout for row in run.rows) == 12
    assert [evaluation.step for evaluation in run.evaluations] == [0, 12]


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "broken")
    (path / "metrics.jsonl").unlink()
    (path / "doctor.json").write_text("{")
    assert {note.split(" ")[0] for note in read_run(path).notes} == {"metrics.jsonl", "doctor.json"}


def test_lines_that_are_no_metrics_are_counted_in_one_note(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('garbage\n[]\n{}\n{"kind": "x", "rollout": 1, "optimizer_step": 1}\n')
    run = read_run(path)
    assert len(run.rows) == 16
    assert [note.split(" of ")[0] for note in run.notes] == ["2 lines", "2 lines"]


def test_lines_of_another_version_are_left_out_with_a_note(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "transitions.jsonl").write_text('{"seq": 1, "role": "train"}\n')
    (path / "evaluations" / "eval-000012.jsonl").write_text('{"question": 1}\n')
    run = read_run(path)
    assert run.moves == ()
    assert [evaluation.step for evaluation in run.evaluations] == [0]
    assert len(run.notes) == 2


def test_a_folder_that_is_no_run_names_what_was_expected(tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    with pytest.raises(UnirlError, match=r"no config\.yaml.*below it: one.*<run_name>"):
        read_run(tmp_path)
    with pytest.raises(UnirlError, match="is no folder"):
        read_run(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ("run_name: x\n", "has no model and no num_rollouts"),
        ("- run_name\n", "has no run_name and no model and no num_rollouts"),
        ("run_name: x\nmodel: tiny\nnum_rollouts: many\n", "has no model and no num_rollouts"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_config_that_is_no_runs_is_an_error(tmp_path: Path, config: str, found: str) -> None:
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "metrics.jsonl").write_text("garbage\n")
    with pytest.raises(UnirlError, match=f"{found}.*<output_dir>/<run_name>"):
        read_run(tmp_path)


@pytest.mark.parametrize("kept", [["config.yaml"], []])
def test_what_unirl_evaluate_left_is_called_by_its_name(tmp_path: Path, kept: list[str]) -> None:
    path = write_run(tmp_path / "evaluated")
    rows = [row for row in read_lines(path / "metrics.jsonl") if row["kind"] == "eval"]
    write_rows(path, rows)
    for name in {"config.yaml", "run.log"} - set(kept):
        (path / name).unlink()
    with pytest.raises(UnirlError, match="`unirl evaluate` left its evaluations there"):
        read_run(path)


def test_sessions_tell_interruptions_and_resumes(tmp_path: Path) -> None:
    path = write_run(tmp_path / "twice")
    write_sessions(path, (0, 4, "interrupted", "Ctrl-C"), (4, 12, "finished", ""))
    outcome = outcome_of(read_run(path))
    assert outcome.state == "finished"
    assert outcome.sentence == "All 12 rollouts are done. Resumed 1 time, at rollout 4."
    assert outcome.resumed_at == (4,)
    write_sessions(path, (0, 4, "interrupted", "max_hours"))
    assert outcome_of(read_run(path)).sentence == "Interrupted after 4 rollouts by max_hours."
    write_sessions(path, (0, None, "failed", "RewardError: no answer."))
    failed = outcome_of(read_run(path))
    assert (failed.state, failed.sentence) == (
        "failed",
        "Failed after 12 rollouts: RewardError: no answer.",
    )
    write_sessions(path, (0, 12, "finished", "stop_on=[hacking]"))
    assert "stop_on=[hacking] was met" in outcome_of(read_run(path)).sentence


def test_a_run_that_holds_its_folder_is_going_on_and_another_was_killed(tmp_path: Path) -> None:
    path = write_run(tmp_path / "half")
    write_rows(path, read_lines(path / "metrics.jsonl")[:6])
    write_sessions(path, (0, 4, "interrupted", "SIGTERM"), (4, None, None, ""))
    outcome = outcome_of(read_run(path))
    assert outcome.state == "killed"
    assert "it noted no end" in outcome.sentence
    with (path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert outcome_of(read_run(path)).state == "going on"


def test_warnings_that_differ_in_numbers_alone_are_told_once(tmp_path: Path) -> None:
    path = write_run(tmp_path / "warned")
    write_log(
        path,
        [
            "WARNING step 12 skipped: gradient is not finite",
            "WARNING step 14 skipped: gradient is not finite",
            "ERROR the scorer failed\nTraceback\n  line",
            "INFO all is well",
        ],
    )
    found = warned(read_run(path))
    assert [(warning.level, warning.count) for warning in found] == [("warning", 2), ("error", 1)]
    assert found[1].message.endswith("Traceback\n  line")
