"""`unirl report` on real runs: one by itself, two beside each other, and what a run writes at its
end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from runs import Run, train

from unirl.cli.main import main
from unirl.runtime import finish as runtime


def two_evaluations(directory: Path, *overrides: str) -> Run:
    return train(directory, "eval_interval=2", "logging.media_max_items=2", *overrides)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two that differ in their seed."""
    folder = tmp_path_factory.mktemp("runs")
    return [two_evaluations(folder / f"seed-{seed}", f"seed={seed}") for seed in (0, 1)]


def test_a_run_writes_its_report_at_its_end(runs: list[Run]) -> None:
    html = (runs[0].directory / "report.html").read_text()
    assert ">finished</b>All 2 rollouts are done." in html
    assert html.count('src="data:image/png;base64,') == 4  # two prompts, before and after
    assert "All 10 findings are fine" in html
    for axis in ("Rollouts", "Wall time", "Device time", "Images", "Denoiser evaluations"):
        assert f"{axis}</label>" in html
    assert not re.search(r"https?://", html)


def test_the_command_makes_the_page_again(
    runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs[0].directory / "report.html"
    before = path.read_text()
    path.unlink()
    assert main(["report", str(runs[0].directory)]) == 0
    assert str(path) in capsys.readouterr().out
    # The run wrote its last lines after its own report.
    assert path.read_text().count("<figure") == before.count("<figure")


def test_two_runs_are_compared(runs: list[Run], tmp_path: Path) -> None:
    output = tmp_path / "both.html"
    words = ["report", *(str(run.directory) for run in runs), "--output", str(output)]
    assert main(words) == 0
    html = output.read_text()
    assert "2 runs beside each other" in html
    assert "seed, 2 seeds" in html
    assert html.count('src="data:image/png;base64,') == 8


def test_a_folder_that_is_no_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "it has no config.yaml" in capsys.readouterr().err


def test_a_record_of_a_run_is_never_overwritten(
    runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    record = runs[0].directory / "metrics.jsonl"
    before = record.read_bytes()
    assert main(["report", str(runs[0].directory), "--output", str(record)]) == 1
    assert "--output" in capsys.readouterr().err
    assert record.read_bytes() == before


def test_a_report_that_fails_costs_a_warning_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(directories: list[Path]) -> Path:
        raise RuntimeError("no template")

    monkeypatch.setattr(runtime, "write_report", fail)
    run = train(tmp_path / "run", "num_rollouts=1")
    assert run.exit_code == 0, run.errors
    assert "WARNING no report was written: RuntimeError: no template" in run.log
    assert "Everything is in" in run.log
