"""Resuming at an earlier step leaves nothing of the abandoned course to be picked up."""

from pathlib import Path

from unirl.checkpoint.finding import find_checkpoint
from unirl.checkpoint.store import CheckpointStore


def _write(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"weights")


def test_checkpoints_beyond_the_resumed_step_are_renamed_not_deleted(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (2, 4, 6):
        store.save(step, _write)
    store.set_aside_after(2)
    assert find_checkpoint(tmp_path).name == "checkpoint-2"
    aside = sorted(path.name for path in tmp_path.glob("*.before-resume-2"))
    assert aside == ["checkpoint-4.before-resume-2", "checkpoint-6.before-resume-2"]


def test_setting_aside_twice_keeps_both(tmp_path):
    store = CheckpointStore(tmp_path)
    for _ in range(2):
        store.save(2, _write)
        store.save(4, _write)
        store.set_aside_after(2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "checkpoint-2",
        "checkpoint-4.before-resume-2",
        "checkpoint-4.before-resume-2-2",
    ]
