"""The head of a page says how sure a change is."""

from __future__ import annotations

from pathlib import Path

from report_runs import PROMPTS, read_lines, write_rows, write_run, write_samples

from unirl.report.reading import read_run
from unirl.report.shown import families
from unirl.report.summary import Summary, summarize
from unirl.tracking.evaluations import note_changes


def summary_of(path: Path) -> Summary:
    return summarize(families([read_run(path)])[0].runs[0])


def test_a_change_beyond_its_interval_is_better_or_worse(tmp_path: Path) -> None:
    for name, gain, direction in (("up", 0.3, "better"), ("down", -0.3, "worse")):
        result = summary_of(write_run(tmp_path / name, gain=gain)).result
        assert result is not None
        assert result.direction == direction
        assert result.change_width.startswith("± ")
        assert "the same 4 prompts and noise" in result.sentence


def test_a_change_within_its_interval_is_no_colour(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", gain=0.0)
    write_samples(path, 12, ["x", "y", "z", "w"], 0.39, 16)
    result = summary_of(path).result
    assert result is not None
    assert result.direction == "same"
    assert result.sentence.startswith("Within what chance would do")


def test_without_samples_nothing_is_said_to_be_sure(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    for file in (path / "evaluations").iterdir():
        file.unlink()
    result = summary_of(path).result
    assert result is not None
    assert (result.first, result.change) == ("0.400", "+0.300")
    assert (result.first_width, result.direction) == ("", "same")


def test_intervals_that_a_run_logged_are_taken_as_they_are(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    rows = read_lines(path / "metrics.jsonl")
    write_rows(path, [{**row, "eval/reward_ci95": 0.123} for row in rows])
    result = summary_of(path).result
    assert result is not None
    assert result.first_width == "± 0.123"


def test_the_last_evaluation_says_when_it_was_unless_it_was_at_the_end(tmp_path: Path) -> None:
    at_end = summary_of(write_run(tmp_path / "end", num_rollouts=12)).result
    before_end = summary_of(write_run(tmp_path / "before", num_rollouts=14)).result
    assert at_end is not None
    assert before_end is not None
    assert (at_end.first_when, at_end.last_when) == ("", "")
    assert (before_end.first_when, before_end.last_when) == ("", "after 12 of 14 rollouts")


def test_a_single_evaluation_says_when_it_was(tmp_path: Path) -> None:
    result = summary_of(write_run(tmp_path / "run", num_rollouts=3)).result
    assert result is not None
    assert (result.first_when, result.change) == ("before training", "")


def test_samples_of_other_evaluations_are_no_change_of_these(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "evaluations" / "eval-000012.jsonl").rename(path / "evaluations/eval-000008.jsonl")
    result = summary_of(path).result
    assert result is not None
    assert (result.change, result.change_width, result.direction) == ("+0.300", "", "same")


def test_evaluations_that_were_made_otherwise_are_not_compared(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", num_rollouts=12)
    note_changes(path, 8, ["seed: 0 -> 3"])
    write_samples(path, 8, PROMPTS, 0.6, 16)
    result = summary_of(path).result
    assert result is not None
    assert (result.first, result.first_when) == ("0.600", "after 8 of 12 rollouts")
    assert (result.last, result.last_when) == ("0.700", "")
    assert result.change == "+0.100"
    note_changes(path, 12, ["seed: 3 -> 4"])
    result = summary_of(path).result
    assert result is not None
    assert result.change == ""
    assert "once since its evaluation changed" in result.sentence


def test_facts_tell_what_was_trained_on_what(tmp_path: Path) -> None:
    config = {"stack": {"lora": {"rank": 8}}, "num_devices": 4, "batch_size": 8}
    facts = dict(summary_of(write_run(tmp_path / "run", config=config)).facts)
    assert facts["Trained"] == "LoRA of rank 8"
    assert facts["Devices"] == "4"
    assert facts["Rollouts"] == "12 of 12"
    assert facts["Wall time"] == "1 min 44 s"
    assert facts["Images"] == "1.54 k"
