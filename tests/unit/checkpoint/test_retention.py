"""Which checkpoints stay, which one is taken up, and that a kill at any moment loses none."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unirl.checkpoint.finding import find_checkpoint, newest_sound
from unirl.checkpoint.manifest import verify
from unirl.checkpoint.store import CheckpointStore
from unirl.core.errors import CheckpointError


def save(directory: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(directory)
    for step in steps:
        store.save(step, lambda folder, step=step: _write(folder, step))
    return store


def _write(folder: Path, step: int) -> None:
    (folder / "weights.bin").write_bytes(b"weights %d" % step)


def damage(checkpoint: Path) -> None:
    (checkpoint / "weights.bin").write_bytes(b"other")


def test_the_newest_ones_and_the_best_one_stay(tmp_path):
    store = save(tmp_path, 2, 4, 6, 8, 10)
    assert store.retain(2, besides=4) == [6, 2]
    assert store.steps() == [10, 8, 4]
    assert store.retain(2, besides=10) == [4]
    assert store.retain(2, besides=None) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-8"]


def test_the_link_best_leads_to_a_checkpoint_that_can_be_loaded(tmp_path):
    store = save(tmp_path, 2, 4)
    for step in (4, 2):
        store.mark_best(step)
        assert find_checkpoint(tmp_path / "best").resolve().name == f"checkpoint-{step}"
    assert find_checkpoint(tmp_path).name == "checkpoint-4", "the newest, as without the link"
    store.mark_best(None)
    store.mark_best(None)
    assert not (tmp_path / "best").is_symlink()


def test_auto_takes_the_newest_sound_one_and_says_why_not_a_newer_one(tmp_path):
    save(tmp_path, 1, 2, 3)
    damage(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-2" / "manifest.json").unlink()
    found = newest_sound(tmp_path)
    assert found.folder == tmp_path / "checkpoint-1"
    first, second = found.skipped
    assert "checkpoint-3/weights.bin is damaged" in first
    assert "checkpoint-2/manifest.json is missing" in second


def test_auto_without_a_checkpoint_starts_afresh_but_never_over_damaged_ones(tmp_path):
    assert newest_sound(tmp_path / "nowhere").folder is None
    save(tmp_path, 1)
    damage(tmp_path / "checkpoint-1")
    with pytest.raises(CheckpointError, match=r"no checkpoint is sound(.|\n)*is damaged"):
        newest_sound(tmp_path)


KILLED_AT = """
import os, signal, sys
from pathlib import Path
from unirl.checkpoint.store import CheckpointStore

directory, moment = sys.argv[1], int(sys.argv[2])
count = 0

def hook(event, args):
    global count
    names = [name for name in args if isinstance(name, (str, bytes, Path))]
    if event.split(".")[0] in ("open", "os", "shutil") and any(directory in str(n) for n in names):
        count += 1
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)

def write(folder):
    (folder / "weights.bin").write_bytes(b"weights 6")

sys.addaudithook(hook)
store = CheckpointStore(Path(directory))
store.save(6, write)
store.mark_best(4)
store.retain(1, besides=4)
"""


def test_a_kill_at_any_file_operation_of_a_save_loses_nothing(tmp_path):
    """Saving a step again, pointing at the best, deleting an old one: killed at each operation."""
    moment, ended = 0, False
    while not ended:
        moment += 1
        directory = tmp_path / str(moment)
        save(directory, 2, 4, 6).mark_best(4)
        command = [sys.executable, "-S", "-c", KILLED_AT, str(directory), str(moment)]
        environment = {"PYTHONPATH": ":".join(sys.path)}
        code = subprocess.run(command, env=environment, check=False).returncode
        ended = code == 0
        assert code in (0, -signal.SIGKILL)
        newest = newest_sound(directory)
        assert newest.skipped == ()
        assert newest.folder is not None
        assert (newest.folder / "weights.bin").read_bytes() == b"weights 6"
        verify(directory / "checkpoint-4")
        assert (directory / "best").resolve().name == "checkpoint-4"
        # Whatever was left, the next save works and cleans up.
        save(directory, 8).retain(1, besides=4)
        left = sorted(path.name for path in directory.iterdir() if path.name != ".best")
        assert left == ["best", "checkpoint-4", "checkpoint-8"]
    assert moment > 15
