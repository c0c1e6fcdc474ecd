"""When a window ends and when weights are synced."""

from __future__ import annotations

import pytest

from unirl.trainer.windows import sync_is_due, windows


@pytest.mark.parametrize(
    ("start", "total", "size", "expected"),
    [
        (0, 3, 1, [[0], [1], [2]]),
        (0, 4, 2, [[0, 1], [2, 3]]),
        (2, 6, 2, [[2, 3], [4, 5]]),
        (0, 5, 2, [[0, 1], [2, 3], [4]]),
        (3, 3, 2, []),
        (5, 3, 1, []),
    ],
)
def test_windows_cover_the_rest_of_the_run_in_order(start, total, size, expected):
    assert [list(window) for window in windows(start, total, size)] == expected


@pytest.mark.parametrize(
    ("interval", "resumed_at", "expected"),
    [
        (1, None, [1, 2, 3, 4, 5, 6]),
        (2, None, [2, 4, 6]),
        (3, None, [3, 6]),
        (2, 3, [2, 3, 4, 6]),
        (10, 5, [5]),
        (10, None, []),
    ],
)
def test_a_sync_is_due_every_interval_but_not_first_and_always_after_a_resume(
    interval, resumed_at, expected
):
    assert [i for i in range(7) if sync_is_due(i, interval, resumed_at, False)] == expected


def test_a_sync_follows_a_scheduled_save_since_one_follows_a_resume():
    saved = [i for i in range(7) if sync_is_due(i, 3, None, i % 2 == 0)]
    assert saved == [2, 3, 4, 6]


def test_a_run_that_begins_with_other_weights_syncs_before_its_first_rollout():
    assert sync_is_due(0, 5, 0, False)
    assert not sync_is_due(0, 5, None, True)
