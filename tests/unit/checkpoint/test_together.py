"""A checkpoint of many ranks is complete on all of them, or not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_pool import RankPool

from unirl.checkpoint.finding import find_checkpoint
from unirl.checkpoint.store import CheckpointStore
from unirl.checkpoint.together import save_together
from unirl.core.errors import CheckpointError, RankError
from unirl.distributed.group import joined
from unirl.distributed.ranks import OneRank

Result = Path | tuple[type[Exception], str]


def save(directory: Path, step: int, failing_rank: int, error: Exception) -> Result:
    """Each rank writes a file of its own; one of them fails instead."""
    with joined() as ranks:

        def write(folder: Path) -> None:
            if ranks.rank == failing_rank:
                raise error
            (folder / f"part-{ranks.rank}").write_text(str(ranks.rank))

        try:
            return save_together(CheckpointStore(directory), step, write, ranks)
        except Exception as caught:
            return type(caught), str(caught)


NOBODY = -1
FULL = OSError(28, "No space left on device")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_has_the_parts_of_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    assert pool.run(2, save, tmp_path, 3, NOBODY, FULL) == [folder, folder]
    assert names(tmp_path) == ["checkpoint-3"]
    assert names(find_checkpoint(folder)) == ["manifest.json", "part-0", "part-1"]


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_rank_that_cannot_write_fails_all_and_leaves_the_earlier_one(
    pool: RankPool, tmp_path: Path, failing_rank: int
) -> None:
    pool.run(2, save, tmp_path, 1, NOBODY, FULL)
    results = pool.run(2, save, tmp_path, 2, failing_rank, FULL)
    for result in results:
        assert isinstance(result, tuple)
        kind, text = result
        assert kind is CheckpointError
        assert "No space left on device" in text
        assert "save_dir" in text
    assert f"rank {failing_rank}: " in str(results[1 - failing_rank])
    assert names(tmp_path) == ["checkpoint-1"]
    assert names(find_checkpoint(tmp_path)) == ["manifest.json", "part-0", "part-1"]


def test_a_folder_that_cannot_be_made_fails_all_without_waiting(
    pool: RankPool, tmp_path: Path
) -> None:
    occupied = tmp_path / "a-file"
    occupied.write_text("")
    for kind, text in pool.run(2, save, occupied, 1, NOBODY, FULL):  # type: ignore[misc]
        assert kind is CheckpointError
        assert str(occupied) in text


def test_an_error_that_is_not_the_disks_keeps_its_kind(pool: RankPool, tmp_path: Path) -> None:
    on_main, on_other = pool.run(2, save, tmp_path, 1, 1, KeyError("weights"))
    assert on_other == (KeyError, "'weights'")
    assert on_main == (RankError, "rank 1: KeyError: 'weights'")
    assert names(tmp_path) == []


def write_one_part(folder: Path) -> None:
    (folder / "part").write_text("x")


def test_one_device_saves_alone(tmp_path: Path) -> None:
    path = save_together(CheckpointStore(tmp_path), 1, write_one_part, OneRank())
    assert names(path) == ["manifest.json", "part"]
