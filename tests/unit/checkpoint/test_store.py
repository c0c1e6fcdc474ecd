"""A checkpoint is complete or not there, and damage is named."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from unirl.checkpoint.finding import find_checkpoint
from unirl.checkpoint.manifest import MANIFEST, verify
from unirl.checkpoint.store import CheckpointStore
from unirl.core.errors import CheckpointError


def write_weights(content: bytes):
    def write(folder: Path) -> None:
        (folder / "policy.bin").write_bytes(content)
        (folder / "optimizer").mkdir()
        (folder / "optimizer" / "state.bin").write_bytes(b"moments of " + content)

    return write


def weights(checkpoint: Path) -> bytes:
    return (checkpoint / "policy.bin").read_bytes()


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def out_of_space(folder: Path) -> None:
    (folder / "policy.bin").write_bytes(b"x" * 1000)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_saved_checkpoint_is_found_and_verified(tmp_path):
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (2, 10, 4):
        saved = store.save(step, write_weights(b"step %d" % step))
        assert saved.name == f"checkpoint-{step}"
    assert names(tmp_path / "run" / "checkpoints") == {
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-10",
    }
    for path in (saved.parent / "checkpoint-10", saved.parent, tmp_path / "run"):
        found = find_checkpoint(path)
        assert weights(found) == b"step 10", "newest by number, not by name or time"
    manifest = verify(found)
    assert manifest.step == 10
    assert set(manifest.files) == {"policy.bin", "optimizer/state.bin"}
    assert manifest.files["policy.bin"].num_bytes == 7


def test_saving_a_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(3, write_weights(b"old"))
    store.save(3, write_weights(b"new"))
    assert weights(find_checkpoint(tmp_path)) == b"new"
    assert names(tmp_path) == {"checkpoint-3"}


def test_a_full_disk_keeps_what_is_there_and_says_what_to_do(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, write_weights(b"good"))
    for step in (1, 2):
        with pytest.raises(CheckpointError) as raised:
            store.save(step, out_of_space)
        message = str(raised.value)
        for part in (
            f"checkpoint-{step}",
            str(tmp_path),
            "No space left",
            "0.0 MB were written",
            "are free",
            "needs about",
            "Still intact: checkpoint-1",
            "save_dir",
        ):
            assert part in message
        assert names(tmp_path) == {"checkpoint-1"}
    assert weights(find_checkpoint(tmp_path)) == b"good"


@pytest.mark.parametrize("failing", ["rename", "fsync"])
def test_a_failure_after_writing_keeps_the_replaced_checkpoint(tmp_path, monkeypatch, failing):
    store = CheckpointStore(tmp_path)
    store.save(1, write_weights(b"old"))
    rename = Path.rename

    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def refuse_new(self, target):
        return refuse() if self.name.startswith(".writing-") else rename(self, target)

    if failing == "rename":
        monkeypatch.setattr(Path, "rename", refuse_new)
    else:
        monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(CheckpointError, match="Read-only"):
        store.save(1, write_weights(b"new"))
    monkeypatch.undo()
    assert weights(find_checkpoint(tmp_path)) == b"old"
    assert names(tmp_path) == {"checkpoint-1"}


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"file/checkpoints.*\n.*are free.*\n.*\n.*save_dir"):
        CheckpointStore(tmp_path / "file" / "checkpoints").save(1, write_weights(b"x"))


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()])
def test_other_failures_pass_unchanged_and_leave_no_rest(tmp_path, error):
    def write(folder: Path) -> None:
        (folder / "policy.bin").write_bytes(b"half")
        raise error

    with pytest.raises(type(error)) as raised:
        CheckpointStore(tmp_path).save(1, write)
    assert raised.value is error
    assert names(tmp_path) == set()


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from unirl.checkpoint.store import CheckpointStore

    directory, step, moment = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    die = lambda: os.kill(os.getpid(), signal.SIGKILL)
    rename = Path.rename

    def killed_rename(self, target):
        if moment == "before the rename" or self.name.startswith(".writing-"):
            die()
        return rename(self, target)

    def write(folder):
        (folder / "policy.bin").write_bytes(b"new")
        if moment == "in the write":
            die()

    Path.rename = killed_rename
    CheckpointStore(directory).save(step, write)
"""


@pytest.mark.parametrize("step", [1, 2], ids=["same step", "next step"])
@pytest.mark.parametrize("moment", ["in the write", "before the rename", "between the renames"])
def test_a_kill_leaves_the_earlier_checkpoint_readable(tmp_path, step, moment):
    store = CheckpointStore(tmp_path)
    store.save(1, write_weights(b"old"))
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), str(step), moment]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert f".writing-checkpoint-{step}" in names(tmp_path), "killed too early"
    assert weights(find_checkpoint(tmp_path)) == b"old"

    store.save(3, write_weights(b"newest"))
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-3"}, "the rest is cleaned"
    assert weights(find_checkpoint(tmp_path / "checkpoint-1")) == b"old"


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (lambda c: flip_byte(c / "policy.bin"), ["policy.bin is damaged", "expected sha256"]),
        (
            lambda c: (c / "policy.bin").write_bytes(b"ne"),
            ["policy.bin is damaged: expected 6 bytes, found 2"],
        ),
        (
            lambda c: (c / "optimizer" / "state.bin").unlink(),
            ["state.bin is missing", "17 bytes"],
        ),
        (lambda c: (c / MANIFEST).unlink(), [f"{MANIFEST} is missing", "never completed"]),
        (lambda c: (c / MANIFEST).write_text('{"format_'), [f"{MANIFEST} is damaged"]),
        (lambda c: (c / MANIFEST).write_text("[]"), [f"{MANIFEST} is damaged"]),
        (lambda c: (c / MANIFEST).write_bytes(b"\xff\xfe"), [f"{MANIFEST} is damaged"]),
    ],
)
def test_damage_is_named_with_the_newest_sound_alternative(tmp_path, damage, parts):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        newest = store.save(step, write_weights(b"newest"))
    flip_byte(tmp_path / "checkpoint-2" / "policy.bin")
    damage(newest)
    for path in (tmp_path, newest):
        with pytest.raises(CheckpointError) as raised:
            find_checkpoint(path)
        for part in [*parts, f"set load_dir={tmp_path / 'checkpoint-1'}"]:
            assert part in str(raised.value)


def test_a_sound_older_checkpoint_can_be_named_directly(tmp_path):
    store = CheckpointStore(tmp_path)
    older = store.save(1, write_weights(b"older"))
    flip_byte(store.save(2, write_weights(b"newer")) / "policy.bin")
    assert find_checkpoint(older) == older


def test_a_damaged_only_checkpoint_has_no_alternative(tmp_path):
    flip_byte(CheckpointStore(tmp_path).save(1, write_weights(b"only")) / "policy.bin")
    with pytest.raises(CheckpointError, match="No other sound checkpoint"):
        find_checkpoint(tmp_path)


def test_a_checkpoint_of_another_format_version_is_refused(tmp_path):
    saved = CheckpointStore(tmp_path).save(1, write_weights(b"x"))
    manifest = json.loads((saved / MANIFEST).read_text())
    (saved / MANIFEST).write_text(json.dumps(manifest | {"format_version": 99}))
    with pytest.raises(CheckpointError, match="format version 99"):
        verify(saved)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: None, "found nothing"),
        (lambda path: path.write_text("weights"), "found a file"),
        (lambda path: path.mkdir(), "no checkpoint-<step> folder"),
    ],
)
def test_a_path_without_checkpoints_is_an_error_about_load_dir(tmp_path, make, found):
    path = tmp_path / "run"
    make(path)
    with pytest.raises(CheckpointError, match="load_dir") as raised:
        find_checkpoint(path)
    assert found in str(raised.value)


def test_a_path_the_system_refuses_is_an_error_about_load_dir(tmp_path):
    with pytest.raises(CheckpointError, match=r"load_dir=.* cannot be read: File name too long"):
        find_checkpoint(tmp_path / ("x" * 300))


def test_the_word_of_a_command_is_not_called_load_dir(tmp_path):
    with pytest.raises(CheckpointError, match="found nothing") as nowhere:
        find_checkpoint(tmp_path / "run", key=None)
    with pytest.raises(CheckpointError, match="Name another run") as empty:
        find_checkpoint(tmp_path, key=None)
    older = CheckpointStore(tmp_path).save(1, write_weights(b"older"))
    flip_byte(CheckpointStore(tmp_path).save(2, write_weights(b"newer")) / "policy.bin")
    with pytest.raises(CheckpointError, match=f"name {older} to use it") as damaged:
        find_checkpoint(tmp_path, key=None)
    assert all("load_dir" not in str(raised.value) for raised in (nowhere, empty, damaged))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("runs/base/checkpoints/checkpoint-9", "runs/base/checkpoints has checkpoint-2, check"),
        ("runs/base/checkpoint-9", "runs/base/checkpoints has checkpoint-2, checkpoint-10."),
        ("runs/bse/checkpoints/checkpoint-2", "runs has base, other."),
        ("runs/other/checkpoints", "runs/other has no folders."),
        ("run/base", "There is no folder run in "),
    ],
)
def test_a_mistyped_checkpoint_is_answered_with_what_is_there(tmp_path, monkeypatch, asked, told):
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore(Path("runs/base/checkpoints"))
    for step in (2, 10):
        store.save(step, write_weights(b"x"))
    Path("runs/other").mkdir()
    with pytest.raises(CheckpointError, match="found nothing") as raised:
        find_checkpoint(Path(asked), key=None)
    assert told in str(raised.value)


def test_the_newest_of_many_checkpoints_are_named(tmp_path):
    for step in range(20):
        (tmp_path / f"checkpoint-{step}").mkdir()
    with pytest.raises(CheckpointError, match=r"has 8 others, checkpoint-8, .*, checkpoint-19"):
        find_checkpoint(tmp_path / "checkpoint-99")


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting is not permitted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def save_bytes(folder: Path) -> None:
    (folder / "policy.bin").write_bytes(b"x" * 2_000_000)


def save_torch(folder: Path) -> None:
    import torch

    torch.save(torch.zeros(500_000), folder / "policy.pt")


def save_safetensors(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(500_000)}, folder / "policy.safetensors")


def save_shards(folder: Path) -> None:
    import torch

    from unirl.checkpoint.shards import write_shards

    write_shards(folder, {"weight": torch.zeros(500_000)}, alone=True)


@pytest.mark.parametrize("write", [save_bytes, save_torch, save_safetensors, save_shards])
def test_a_really_full_disk_keeps_the_earlier_checkpoint(small_disk, write):
    store = CheckpointStore(small_disk)
    store.save(1, write_weights(b"x" * 300_000))
    with pytest.raises(CheckpointError, match="Still intact: checkpoint-1"):
        store.save(2, write)
    assert find_checkpoint(small_disk).name == "checkpoint-1"
    assert names(small_disk) == {"checkpoint-1"}
