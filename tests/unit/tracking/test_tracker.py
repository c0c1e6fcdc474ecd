"""Rows reach every sink, and closing hides no error."""

from pathlib import Path

import pytest

from unirl.tracking.tracker import Panel, Picture, Row, Sink, Tracker

PANEL = Panel("eval/samples", 3, (Picture(Path("0000.png"), "a cat", 0.5),))
ROW = Row("rollout", 0, 1, {"rollout/reward_mean": 0.5})


class RecordingSink(Sink):
    def __init__(self, close_error: Exception | None = None) -> None:
        self.rows: list[Row] = []
        self.panels: list[Panel] = []
        self.closed = False
        self._close_error = close_error

    def log(self, row):
        self.rows.append(row)

    def show(self, panel):
        self.panels.append(panel)

    def close(self):
        self.closed = True
        if self._close_error:
            raise self._close_error


def test_every_sink_gets_rows_and_pictures():
    sinks = [RecordingSink(), RecordingSink()]
    with Tracker(sinks) as tracker:
        tracker.log(ROW)
        tracker.show(PANEL)
    for sink in sinks:
        assert sink.rows == [ROW]
        assert sink.panels == [PANEL]
        assert sink.closed


def test_a_tracker_without_sinks_is_silent(capsys):
    with Tracker([]) as tracker:
        tracker.log(ROW)
        tracker.show(PANEL)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "close", [Tracker.close, lambda tracker: tracker.__exit__(None, None, None)]
)
def test_all_sinks_are_closed_and_the_first_failure_is_raised(close):
    first, second = RuntimeError("first"), RuntimeError("second")
    sinks = [RecordingSink(first), RecordingSink(), RecordingSink(second)]
    with pytest.raises(RuntimeError) as raised:
        close(Tracker(sinks))
    assert raised.value is first
    assert all(sink.closed for sink in sinks)


@pytest.mark.parametrize("error", [ValueError("in flight"), KeyboardInterrupt()])
def test_a_failing_close_never_hides_the_exception_in_flight(error, caplog):
    sinks = [RecordingSink(RuntimeError("cannot close")), RecordingSink()]
    with pytest.raises(type(error)) as raised, Tracker(sinks):
        raise error
    assert raised.value is error
    assert all(sink.closed for sink in sinks)
    assert "cannot close" in caplog.text


def test_windows_and_evaluations_share_an_axis_of_rollouts_done():
    assert Row("rollout", 3, 8, {}).axes() == {"rollout/step": 4.0, "train/step": 8.0}
    assert Row("eval", 4, 8, {}).axes() == {"eval/step": 4.0}


def test_pictures_of_a_panel_have_names_of_their_own_and_captions():
    one, two = Picture(Path("0.png"), "a cat", 0.51234), Picture(Path("1.png"), "a dog")
    assert [tag for tag, _ in Panel("eval/grid", 0, (one,)).tagged()] == ["eval/grid"]
    tagged = dict(Panel("eval/samples", 0, (one, two)).tagged())
    assert tagged == {"eval/samples/0000": one, "eval/samples/0001": two}
    assert [picture.caption for picture in tagged.values()] == ["0.512 a cat", "a dog"]
