"""A report replaces a report and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_runs import write_run

from unirl.core.errors import UnirlError
from unirl.report.page import write_report


def test_a_report_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config={"description": "<b>" * 5000})
    first = write_report([run], tmp_path / "page.htm").read_text()
    assert write_report([run], tmp_path / "page.htm").read_text() == first


@pytest.mark.parametrize("name", ["metrics.jsonl", "report", "config.yaml"])
def test_a_target_that_is_no_page_by_its_name_is_refused(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UnirlError, match=r"--output end in \.html"):
        write_report([run], run / name)
    assert (run / "metrics.jsonl").read_bytes() == before
    assert not (run / "report").exists()


@pytest.mark.parametrize("content", ["<!doctype html><html></html>", "", "unirl report"])
def test_a_page_of_someone_else_is_left_as_it_is(tmp_path: Path, content: str) -> None:
    run = write_run(tmp_path / "run")
    own = tmp_path / "index.html"
    own.write_text(content)
    with pytest.raises(UnirlError, match=r"index\.html exists and was not made by .*--output"):
        write_report([run], own)
    assert own.read_text() == content
    own.rename(run / "report.html")
    with pytest.raises(UnirlError, match="not made by unirl report"):
        write_report([run])


def test_a_folder_is_refused_as_a_target(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "pages.html").mkdir()
    for folder in (tmp_path, tmp_path / "pages.html"):
        with pytest.raises(UnirlError, match=r"is a folder.*--output: .*report\.html"):
            write_report([run], folder)


def test_a_target_that_the_disk_refuses_is_told_by_its_option(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with pytest.raises(UnirlError, match="--output") as caught:
        write_report([run], run / "metrics.jsonl" / "page.html")
    assert "output_dir" not in str(caught.value)
