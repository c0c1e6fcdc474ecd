"""The head of a page says how sure a change is."""

from __future__ import annotations

from pathlib import Path

from report_runs import read_lines, write_rows, write_run, write_samples

from unirl.report.reading import read_run
from unirl.report.shown import families
from unirl.report.summary import Summary, summarize


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


def test_facts_tell_what_was_trained_on_what(tmp_path: Path) -> None:
    config = {"stack": {"lora": {"rank": 8}}, "num_devices": 4, "batch_size": 8}
    facts = dict(summary_of(write_run(tmp_path / "run", config=config)).facts)
    assert facts["Trained"] == "LoRA of rank 8"
    assert facts["Devices"] == "4"
    assert facts["Rollouts"] == "12 of 12"
    assert facts["Wall time"] == "1 min 44 s"
    assert facts["Images"] == "1.54 k"
