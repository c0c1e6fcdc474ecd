"""Rows that are the same question are asked once."""

from __future__ import annotations

import pytest
import torch

from unirl.samplers.distinct import distinct, distinct_ids


@pytest.mark.parametrize("names", ["aabb", "abab", "abcd", "a", "baab"])
def test_every_row_is_the_first_of_its_kind(names: str) -> None:
    for found in (distinct(names), distinct_ids(torch.tensor([ord(name) for name in names]))):
        assert len(found) == len(set(names))
        again = found.first[found.kind].tolist()
        assert "".join(names[row] for row in again) == names
        assert all(names.index(names[row]) == row for row in found.first.tolist())


def test_rows_that_all_differ_keep_their_order() -> None:
    assert distinct("dcba").first.tolist() == [0, 1, 2, 3]
    assert distinct_ids(torch.tensor([3, 5, 9])).first.tolist() == [0, 1, 2]
