"""A sink behind a queue gets everything in order, and can neither slow nor end a run."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from unirl.tracking.background import BackgroundSink
from unirl.tracking.tracker import Panel, Row, Sink, Tracker

ROWS = [Row("rollout", number, number + 1, {"train/loss": float(number)}) for number in range(500)]
PANEL = Panel("eval/samples", 500, ())


class Recorder(Sink):
    """Notes what comes, in which thread."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.threads: set[int] = set()

    def log(self, row: Row) -> None:
        self.threads.add(threading.get_ident())
        self.seen.append(row)

    def show(self, panel: Panel) -> None:
        self.seen.append(panel)

    def close(self) -> None:
        self.seen.append("closed")


class Raises(Recorder):
    """From the third row on."""

    def log(self, row: Row) -> None:
        super().log(row)
        if row.rollout >= 2:
            raise ConnectionError("the server is gone")


class Hangs(Recorder):
    """At the first row, until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.released = threading.Event(), threading.Event()

    def log(self, row: Row) -> None:
        self.reached.set()
        self.released.wait()
        super().log(row)


class FailsToClose(Recorder):
    def close(self) -> None:
        raise OSError("no space")


def test_everything_arrives_in_order_before_close_returns() -> None:
    recorder = Recorder()
    with Tracker([BackgroundSink("slow", recorder)]) as tracker:
        for row in ROWS:
            tracker.log(row)
        tracker.show(PANEL)
    assert recorder.seen == [*ROWS, PANEL, "closed"]
    assert threading.get_ident() not in recorder.threads


def test_a_sink_that_raises_is_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink, other = Raises(), Recorder()
    with Tracker([BackgroundSink("wandb", sink), other]) as tracker:
        for row in ROWS:
            tracker.log(row)
    assert sink.seen == [*ROWS[:3], "closed"]
    assert other.seen == [*ROWS, "closed"]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("wandb failed and is left out from now on; the run goes on")
    assert warning.endswith("ConnectionError: the server is gone")


def test_a_sink_that_hangs_loses_rows_and_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    sink = Hangs()
    background = BackgroundSink("trackio", sink, capacity=2, patience_seconds=0.05)
    background.log(ROWS[0])
    assert sink.reached.wait(60)
    for row in ROWS[1:10]:  # two of them wait
        background.log(row)
    background.close()
    late, dropped = [record.getMessage() for record in caplog.records]
    assert late.startswith("trackio did not finish within 0.05 s and was left behind")
    assert dropped.startswith("trackio was too slow: 7 rows and panels were not sent")
    assert sink.seen == []
    sink.released.set()


def test_a_sink_that_is_slow_at_the_end_is_waited_for() -> None:
    class Slow(Recorder):
        def log(self, row: Row) -> None:
            time.sleep(0.01)
            super().log(row)

    sink = Slow()
    background = BackgroundSink("slow", sink)
    for row in ROWS[:10]:
        background.log(row)
    background.close()
    assert sink.seen == [*ROWS[:10], "closed"]


def test_a_sink_that_cannot_be_closed_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    with Tracker([BackgroundSink("tensorboard", FailsToClose())]) as tracker:
        tracker.log(ROWS[0])
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "tensorboard failed" in warning
    assert "no space" in warning


@pytest.fixture(autouse=True)
def warnings_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
