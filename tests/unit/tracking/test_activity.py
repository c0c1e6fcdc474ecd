"""What a command says while it works: live on a terminal, a few lines elsewhere."""

from __future__ import annotations

import io

import pytest

from unirl.tracking.activity import Activity
from unirl.tracking.console import ConsoleMode


def work(mode: ConsoleMode) -> str:
    output = io.StringIO()
    activity = Activity(mode, output)
    with activity.doing("loading models/large"):
        pass
    with activity.counting("checkpoint-4", 64) as note_progress:
        for num_done in range(8, 65, 8):
            note_progress(num_done)
    return output.getvalue()


def test_a_terminal_shows_it_live() -> None:
    shown = work("rich")
    assert "loading models/large" in shown
    assert "64/64" in shown


def test_elsewhere_there_is_a_line_at_each_quarter() -> None:
    assert work("plain").splitlines() == [
        "loading models/large",
        "checkpoint-4: 64 prompts",
        *(f"checkpoint-4: {done} of 64 prompts" for done in (16, 32, 48, 64)),
    ]


def test_quiet_is_quiet() -> None:
    assert work("quiet") == ""


@pytest.mark.parametrize("mode", ["rich", "plain"])
def test_an_error_within_comes_through(mode: ConsoleMode) -> None:
    activity = Activity(mode, io.StringIO())
    with pytest.raises(ValueError, match="bad weather"), activity.doing("loading"):
        raise ValueError("bad weather")
