"""What a command says while it works: live on a terminal, a few lines elsewhere."""

from __future__ import annotations

import io

import pytest

from unirl.tracking.activity import Activity, Count
from unirl.tracking.console import ConsoleMode
from unirl.tracking.running import Running


def work(mode: ConsoleMode) -> str:
    """Loads, and counts 64 prompts in chunks of 8, each in two halves that take a second."""
    output = io.StringIO()
    seconds, running = 0.0, Running()
    activity = Activity(mode, output, now=lambda: seconds)
    with activity.doing("loading models/large"):
        pass
    running.begin("rollout")
    with activity.counting("checkpoint-4", 64, "prompts", running) as count:
        for num_done in range(8, 65, 8):
            for half in (4, 8):
                seconds += 1
                count.within(half)
            count.reach(num_done)
    return output.getvalue()


def test_a_terminal_shows_it_live() -> None:
    shown = work("rich")
    assert "loading models/large" in shown
    assert "64/64" in shown
    assert "rollout" in shown


def test_elsewhere_there_is_a_line_at_each_quarter_with_the_time_left() -> None:
    assert work("plain").splitlines() == [
        "loading models/large",
        "checkpoint-4: 64 prompts",
        "checkpoint-4: 16 of 64 prompts, 0:00:12 left",
        "checkpoint-4: 32 of 64 prompts, 0:00:08 left",
        "checkpoint-4: 48 of 64 prompts, 0:00:04 left",
        "checkpoint-4: 64 of 64 prompts",
    ]


def test_no_time_is_left_where_all_takes_less_than_a_second() -> None:
    output = io.StringIO()
    seconds = 0.0
    activity = Activity("plain", output, now=lambda: seconds)
    with activity.counting("checkpoint-4", 2, "samples") as count:
        for num_done in (1, 2):
            seconds += 0.2
            count.reach(num_done)
    assert output.getvalue().splitlines()[1:] == [
        "checkpoint-4: 1 of 2 samples",
        "checkpoint-4: 2 of 2 samples",
    ]


def test_the_work_in_hand_never_counts_beyond_the_total() -> None:
    shown: list[float] = []
    count = Count(10, shown.append)
    count.reach(8)
    count.within(1.5)
    count.within(4)
    assert shown == [8, 9.5, 10]


def test_quiet_is_quiet() -> None:
    assert work("quiet") == ""


@pytest.mark.parametrize("mode", ["rich", "plain"])
def test_an_error_within_comes_through(mode: ConsoleMode) -> None:
    activity = Activity(mode, io.StringIO())
    with pytest.raises(ValueError, match="bad weather"), activity.doing("loading"):
        raise ValueError("bad weather")
