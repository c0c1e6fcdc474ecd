"""What a run is doing is told by where it is."""

from __future__ import annotations

import pytest

from unirl.tracking.running import Running
from unirl.trainer.clock import NoMeter, PhaseClock


def test_phases_within_phases_and_the_time_since_the_outer_one() -> None:
    seconds = 0.0
    running = Running(now=lambda: seconds)
    clock = PhaseClock(NoMeter(), running=running)
    assert running.phase() is None
    with clock.phase("total"):
        assert running.phase() is None
        seconds = 10.0
        with clock.phase("evaluate"):
            seconds = 12.0
            with clock.phase("rollout"), clock.phase("rollout"):
                assert running.phase() == ("evaluate: rollout", 2.0)
            assert running.phase() == ("evaluate", 2.0)
    assert running.phase() is None


def test_a_phase_that_fails_is_over() -> None:
    running = Running()
    clock = PhaseClock(NoMeter(), running=running)
    with pytest.raises(ValueError, match="bad weather"), clock.phase("train"):
        raise ValueError("bad weather")
    assert running.phase() is None
