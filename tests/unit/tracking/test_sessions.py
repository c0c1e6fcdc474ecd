"""How each process of a run ended, as lines that a kill can cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unirl.tracking.sessions import Session, SessionLog, paired, sessions_file


def read(run_dir: Path) -> list[Session]:
    lines = sessions_file(run_dir).read_text().splitlines()
    return list(paired(map(json.loads, lines)))


def test_each_process_has_its_beginning_and_its_end(tmp_path: Path) -> None:
    for start, done in ((0, 4), (4, 8)):
        log = SessionLog(tmp_path)
        log.begin(start)
        log.end(done, "interrupted" if done < 8 else "finished", "Ctrl-C" if done < 8 else "")
    first, second = read(tmp_path)
    assert first.ending is not None
    assert second.ending is not None
    assert (first.rollout, first.ending.rollouts_done, first.ending.reason) == (0, 4, "Ctrl-C")
    assert (second.rollout, second.ending.state) == (4, "finished")


def test_a_killed_process_has_no_end_and_the_next_one_is_another(tmp_path: Path) -> None:
    SessionLog(tmp_path).begin(0)
    log = SessionLog(tmp_path)
    log.begin(2)
    log.end(None, "failed", "RewardError: no answer")
    first, second = read(tmp_path)
    assert first.ending is None
    assert second.ending is not None


def test_an_end_without_a_beginning_writes_nothing(tmp_path: Path) -> None:
    SessionLog(tmp_path).end(None, "failed", "ModelError: no such file")
    assert not sessions_file(tmp_path).exists()


def test_a_disk_that_refuses_at_the_end_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = SessionLog(tmp_path)
    log.begin(0)
    sessions_file(tmp_path).unlink()
    sessions_file(tmp_path).mkdir()
    log.end(3, "finished", "")
    assert "how the run ended is not noted" in caplog.text
