"""Ranks that were started differently are refused together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from rank_pool import RankPool

from unirl.core.errors import ConfigError
from unirl.distributed.agreement import require_same_settings, require_visible
from unirl.distributed.group import joined
from unirl.distributed.ranks import OneRank


def compare(every: Sequence[dict[str, object]]) -> str | None:
    """The refusal of this rank's settings."""
    with joined() as ranks:
        try:
            require_same_settings(every[ranks.rank], ranks)
        except ConfigError as error:
            return str(error)
    return None


def look_for(paths: Sequence[Path]) -> str | None:
    """The refusal of this rank's path."""
    with joined() as ranks:
        try:
            require_visible(paths[ranks.rank], "but it is needed. Set x.", ranks)
        except ConfigError as error:
            return str(error)
    return None


def test_equal_settings_pass(pool: RankPool) -> None:
    assert pool.run(2, compare, [{"a": 1, "b": None}] * 2) == [None, None]
    require_same_settings({"a": 1}, OneRank())


def test_differing_settings_are_named_with_both_values_on_all_ranks(pool: RankPool) -> None:
    refusals = pool.run(3, compare, [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 3}])
    assert refusals[0] == refusals[1] == refusals[2]
    assert refusals[0] is not None
    assert "b is 2 on rank 0 and 3 on rank 2" in refusals[0]
    assert "a is" not in refusals[0]


def test_a_setting_that_one_rank_lacks_is_a_difference(pool: RankPool) -> None:
    for refusal in pool.run(2, compare, [{"a": 1}, {"a": 1, "more": 5}]):
        assert refusal is not None
        assert "more is None on rank 0 and 5 on rank 1" in refusal


def test_a_path_that_one_rank_does_not_see_is_named_on_all(pool: RankPool, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert pool.run(2, look_for, [tmp_path, tmp_path]) == [None, None]
    refusal = f"{absent} is not there on this rank, but it is needed. Set x."
    assert pool.run(2, look_for, [tmp_path, absent]) == [f"rank 1: {refusal}", refusal]


def test_a_missing_path_on_one_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent is not there"):
        require_visible(tmp_path / "absent", "but it is needed.", OneRank())
