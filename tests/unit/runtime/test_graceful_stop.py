"""What asks a run to stop, and with which exit code it ends then."""

from __future__ import annotations

import os
import signal

import pytest

from unirl.runtime.interrupt import GracefulStop


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_and_the_second_one_ends(number, code):
    with GracefulStop() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), number)
        assert stop.requested()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert stop.exit_code == code


def test_a_time_limit_counts_from_the_start_of_the_process():
    stop = GracefulStop()
    stop.limit(None)
    assert not stop.requested()
    stop.limit(1000.0)
    assert not stop.requested()
    stop.limit(1e-9)
    assert stop.requested()
    assert stop.exit_code == 124


def test_a_rank_that_another_one_stopped_ends_as_terminated():
    assert GracefulStop().exit_code == 143
