"""Rows reach every sink, and closing hides no error."""

import pytest

from unirl.tracking.tracker import Row, Sink, Tracker

ROW = Row("rollout", 0, 1, {"rollout/reward_mean": 0.5})


class RecordingSink(Sink):
    def __init__(self, close_error: Exception | None = None) -> None:
        self.rows: list[Row] = []
        self.images: list[tuple] = []
        self.closed = False
        self._close_error = close_error

    def log(self, row):
        self.rows.append(row)

    def image(self, name, path, rollout):
        self.images.append((name, path, rollout))

    def close(self):
        self.closed = True
        if self._close_error:
            raise self._close_error


def test_every_sink_gets_rows_and_images(tmp_path):
    sinks = [RecordingSink(), RecordingSink()]
    with Tracker(sinks) as tracker:
        tracker.log(ROW)
        tracker.image("eval/samples", tmp_path / "grid.png", 3)
    for sink in sinks:
        assert sink.rows == [ROW]
        assert sink.images == [("eval/samples", tmp_path / "grid.png", 3)]
        assert sink.closed


def test_a_tracker_without_sinks_is_silent(tmp_path, capsys):
    with Tracker([]) as tracker:
        tracker.log(ROW)
        tracker.image("eval/samples", tmp_path / "grid.png", 0)
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
