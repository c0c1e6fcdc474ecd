"""Whatever a user gets wrong ends in one clear message that names the file or the key."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Run, contents, train, write_prompts
from safetensors.torch import load_file

import unirl.checkpoint.state
from unirl.checkpoint.finding import find_checkpoint
from unirl.checkpoint.manifest import verify


def assert_refused(run: Run, exit_code: int, *fragments: str) -> None:
    """One message on stderr and no traceback."""
    assert run.exit_code == exit_code, run.output + run.errors
    assert run.errors.startswith("error: ")
    assert run.errors.count("error: ") == 1
    assert "Traceback" not in run.output + run.errors
    for fragment in fragments:
        assert fragment in run.errors


# Prompts


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"", "the file holds no prompt"),
        (b'\x89PNG\r\n\x1a\n\x00\x00{"prompt"', "line 1: not UTF-8 text"),
        (b'{"prompt": "the number \\"1\\" in red on white"}\n{"metadata": {}}\n', "line 2"),
        (b'{"prompt": "  "}\n', "line 1: 'prompt' is blank"),
        (b'{"prompt": \n', "line 1"),
        (b'["a list"]\n', "line 1"),
    ],
    ids=["empty", "binary", "no-text", "blank", "half-a-record", "no-object"],
)
@pytest.mark.parametrize("key", ["data.train", "data.eval"])
def test_a_bad_prompt_file(tmp_path: Path, key: str, content: bytes, fragment: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    run = train(tmp_path / "run", f"{key}={path}", "eval_interval=1")
    assert_refused(run, 3, key, str(path), fragment)
    assert not run.directory.exists()


def test_a_missing_prompt_file(tmp_path: Path) -> None:
    run = train(tmp_path / "run", f"data.train={tmp_path}/none.jsonl")
    assert_refused(run, 3, f"data.train={tmp_path}/none.jsonl: no such file")


def test_metadata_that_a_scorer_needs(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", ["123", "456"], background=None)
    run = train(tmp_path / "run", f"data.train={prompts}")
    assert_refused(run, 1, "scorer 'color'", "metadata.background", "data.train")


def test_metadata_that_a_scorer_cannot_use(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", ["123", "456"], text_color="mauve")
    run = train(tmp_path / "run", f"data.train={prompts}")
    assert_refused(run, 1, "scorer 'color'", "mauve")


@pytest.mark.parametrize("key", ["data.train", "data.eval"])
def test_prompts_that_the_model_cannot_read_are_found_at_the_start(
    tmp_path: Path, key: str
) -> None:
    path = tmp_path / "p.txt"
    path.write_text("the number in red on white\n" * 8 + "a portrait of a cat\n")
    other = "data.eval" if key == "data.train" else "data.train"
    settings = ("reward=jpeg", f"{other}=pkg:numbers/train.jsonl", "eval_interval=1")
    settings = (*settings, "eval_num_prompts=9")
    run = train(tmp_path / "run", f"{key}={path}", *settings)
    assert_refused(run, 1, key, "portrait")
    assert not run.rows()


# Scorers


def only_scorer(name: str, args: str = "{}") -> str:
    """Override that makes a class of failing_scorers.py the whole reward."""
    scorer = f"{{path:'failing_scorers:{name}',args:{args}}}"
    return f"reward.scorers={{ocr:null,color:null,own:{scorer}}}"


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("NotANumber", "returned nan for 1 of 4 images, first for prompt 'the number"),
        ("OneForAll", "shape (1,) for 4 images"),
        ("OneColumn", "shape (4, 1) for 4 images"),
        ("Raises", "ValueError: the judge is asleep"),
        ("Exits", "SystemExit: 7"),
        ("PaintsOver", "wrote into the images"),
    ],
)
def test_a_scorer_that_fails_is_named(tmp_path: Path, name: str, fragment: str) -> None:
    run = train(tmp_path / "run", only_scorer(name))
    assert_refused(run, 1, "scorer 'own'", fragment)


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        (only_scorer("NeedsAFile", "{path: /no/such/file}"), ("reward.scorers.own", "/no/such")),
        (only_scorer("NotAScorer"), ("reward.scorers.own", "Scorer")),
        (only_scorer("NoSuchClass"), ("reward.scorers.own.path", "no 'NoSuchClass'")),
        (only_scorer("Brightness", "{scal: 2}"), ("reward.scorers.own.args", "scal")),
        ("reward.scorers.color.args={colors: /no/such.json}", ("reward.scorers.color", "/no/such")),
        ("reward.scorers.color.args={colours: x}", ("reward.scorers.color", "colours")),
        ("reward.scorers.ocr.path=ocrr", ("reward.scorers.ocr.path", "ocr")),
    ],
)
def test_a_scorer_that_cannot_be_built_is_named(
    tmp_path: Path, override: str, fragments: tuple[str, ...]
) -> None:
    assert_refused(train(tmp_path / "run", override), 3, *fragments)


def test_a_failing_scorer_under_retry_gives_up_after_its_attempts(tmp_path: Path) -> None:
    settings = ("reward.on_failure=retry", "reward.num_retries=2", "reward.retry_seconds=0")
    run = train(tmp_path / "run", only_scorer("Raises"), *settings)
    assert_refused(run, 1, "the judge is asleep")
    assert "attempt 2 of 3" in run.log


def test_dropping_every_group_is_an_error(tmp_path: Path) -> None:
    run = train(tmp_path / "run", only_scorer("Raises"), "reward.on_failure=drop_group")
    assert_refused(run, 1, "every prompt group")


def test_after_a_failed_start_the_same_command_can_be_repeated(tmp_path: Path) -> None:
    assert_refused(train(tmp_path / "run", only_scorer("Raises")), 1)
    assert train(tmp_path / "run").exit_code == 0


# Settings


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (
            "batch_size=3 stack.num_updates_per_batch=4",
            ("batch_size 3 x sampling.samples_per_prompt 2", "= 6 samples", "1.50"),
        ),
        ("sampling.sde_steps.range=[0,0.1]", ("sampling.sde_steps.range", "int(4 x 0.1)")),
        ("sampling.height=20", ("sampling.height", "20 x 32", "16 x 32 only")),
        ("batch_size=2001", ("batch_size", "has only 2000 prompts")),
        ("accumulate_rollouts=3", ("num_rollouts", "multiple of accumulate_rollouts=3")),
        ("model.path=/no/such/model.safetensors", ("model.path", "does not exist")),
        ("device=cuda:7", ("device", "cuda:7")),
        ("device=tpu", ("device", "tpu")),
        ("enable_fsdp_offload=true", ("enable_fsdp_offload", "train_resident=false")),
        ("enable_fsdp_offload=false", ("enable_fsdp_offload", "train_resident=true")),
        ("offload_train_during_reward=true", ("retired", "train_resident=false")),
        ("rollout_sleep_after_generate=true", ("retired", "rollout_resident=false")),
        ("stack.optimiser.learning_rate=1", ("stack.optimizer.learning_rate",)),
        ("train_resident=false", ("train_resident", "trainside")),
    ],
)
def test_a_setting_that_cannot_be(
    tmp_path: Path, overrides: str, fragments: tuple[str, ...]
) -> None:
    run = train(tmp_path / "run", *overrides.split())
    assert_refused(run, 3, *fragments)
    assert not run.rows()


def test_lora_targets_that_match_nothing_are_named_with_those_there_are(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "stack.lora.target_modules=[qkv,to_q]")
    assert_refused(run, 1, "stack.lora.target_modules", "['to_q']", "'qkv'")


@pytest.mark.parametrize("content", ["garbage", "truncated", "empty", "folder", "other"])
def test_a_model_file_that_is_none(tmp_path: Path, content: str) -> None:
    shipped = Path(unirl.__file__).parent / "assets/tiny/model.safetensors"
    path = tmp_path / "model.safetensors"
    match content:
        case "garbage":
            path.write_bytes(b"garbage" * 100)
        case "truncated":
            path.write_bytes(shipped.read_bytes()[:1_000_000])
        case "empty":
            path.touch()
        case "folder":
            path.mkdir()
        case "other":
            unirl.checkpoint.state.save_file({"x": load_file(shipped)["unpatch.bias"]}, path)
    assert_refused(train(tmp_path / "run", f"model.path={path}"), 1, "model.path", str(path))


# Folders


@pytest.mark.parametrize("key", ["output_dir", "save_dir"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, key: str) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    run = train(tmp_path / "run", f"{key}={blocked}/below", "save_interval=1")
    assert_refused(run, 3, str(blocked), key)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two rollouts with checkpoint-1 and checkpoint-2."""
    return train(tmp_path_factory.mktemp("finished") / "run", "save_interval=1")


def test_a_second_run_in_the_same_directory_changes_nothing(finished: Run) -> None:
    before = contents(finished.directory)
    run = train(finished.directory, "save_interval=1", "seed=5")
    assert_refused(run, 3, str(finished.directory), "holds a run already", "load_dir=", "run_name")
    assert contents(finished.directory) == before


def test_a_run_does_not_take_over_the_checkpoints_of_another(finished: Run, tmp_path: Path) -> None:
    before = contents(finished.directory)
    settings = ("save_interval=1", f"save_dir={finished.directory}/checkpoints", "seed=5")
    run = train(tmp_path / "other", *settings)
    assert_refused(run, 3, "save_dir", f"{finished.directory}/checkpoints")
    assert contents(finished.directory) == before


# Checkpoints


def truncate(folder: Path) -> None:
    path = folder / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def flip(folder: Path) -> None:
    path = folder / "optimizer.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def lose_state(folder: Path) -> None:
    (folder / "trainer_state.json").unlink()


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (truncate, "weights.safetensors"),
        (flip, "optimizer.pt"),
        (lose_manifest, "manifest.json"),
        (lose_state, "trainer_state.json"),
    ],
)
def test_a_damaged_checkpoint_is_named_with_the_sound_one(
    finished: Run, tmp_path: Path, damage: Any, file: str
) -> None:
    copy = shutil.copytree(finished.directory, tmp_path / "run")
    damage(copy / "checkpoints" / "checkpoint-2")
    before = contents(copy)
    run = train(copy, "num_rollouts=3", f"load_dir={copy}")
    assert_refused(run, 3, f"checkpoint-2/{file}", f"load_dir={copy}/checkpoints/checkpoint-1")
    assert contents(copy) == before
    resumed = train(copy, "num_rollouts=3", f"load_dir={copy}/checkpoints/checkpoint-1")
    assert resumed.exit_code == 0, resumed.errors
    assert [row["rollout"] for row in resumed.rows("rollout")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("stack.lora.rank=4", ("stack.lora.rank: 16 -> 4", "(16, 128) instead of (4, 128)")),
        (
            "stack.lora.target_modules=[qkv]",
            ("stack.lora.target_modules: None -> ['qkv']", "unexpected"),
        ),
        ("stack.lora=null", ("stack.lora.rank: 16 -> (not set)", "unexpected")),
    ],
)
def test_a_checkpoint_of_another_adapter(
    finished: Run, tmp_path: Path, override: str, fragments: tuple[str, ...]
) -> None:
    settings = ("num_rollouts=3", f"load_dir={finished.directory}")
    run = train(tmp_path / "run", *settings, override)
    assert_refused(run, 3, f"load_dir: {finished.directory}/checkpoints/checkpoint-2", *fragments)


@pytest.mark.parametrize("place", ["nothing", "a-file", "an-empty-folder"])
def test_load_dir_without_a_checkpoint(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    if place == "a-file":
        path.touch()
    elif place == "an-empty-folder":
        path.mkdir()
    assert_refused(train(tmp_path / "run", f"load_dir={path}"), 3, f"load_dir={path}")


# Full disks


def test_a_save_that_fails_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = unirl.checkpoint.state.save_file, []

    def refuse_the_second(tensors: Any, path: Path) -> None:
        calls.append(path)
        write(tensors, path)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(unirl.checkpoint.state, "save_file", refuse_the_second)
    run = train(tmp_path / "run", "num_rollouts=3", "save_interval=1")
    assert_refused(run, 1, "checkpoint-2 could not be written", "No space left on device")
    assert "Still intact: checkpoint-1" in run.errors
    assert find_checkpoint(run.directory) == run.checkpoint(1)
    assert run.checkpoints == ["checkpoint-1"]
    resumed = train(run.directory, "save_interval=1", f"load_dir={run.directory}")
    assert resumed.exit_code == 0
    assert [row["rollout"] for row in resumed.rows("rollout")] == [0, 1]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB: room for one checkpoint and not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up_while_saving(small_disk: Path) -> None:
    run = train(small_disk / "run", "num_rollouts=3", "save_interval=1")
    assert_refused(run, 1, "checkpoint-2 could not be written", "Still intact: checkpoint-1")
    assert verify(run.checkpoint(1)).step == 1
    assert [row["rollout"] for row in run.rows("rollout")] == [0, 1]


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 9])
def test_a_disk_that_fills_up_while_logging(small_disk: Path, num_blocks: int) -> None:
    """The fewer blocks of 4096 bytes are left, the earlier the file that cannot be written."""
    free = os.statvfs(small_disk).f_bavail
    (small_disk / "filler").write_bytes(bytes((free - num_blocks) * 4096))
    run = train(small_disk / "run", "num_rollouts=30", "eval_interval=1")
    assert_refused(run, 1, f"{small_disk}/run/", "No space left on device", "output_dir")
    assert all(row["kind"] in ("eval", "rollout") for row in run.rows())


def test_images_for_a_family_that_takes_none_are_refused_before_anything_loads(
    tmp_path: Path,
) -> None:
    (tmp_path / "cat.png").write_bytes(b"")
    file = tmp_path / "prompts.jsonl"
    line = '{"prompt": "the number \\"7\\"", "images": ["cat.png"]}\n'
    file.write_text(2 * line)
    run = train(tmp_path / "run", f"data.train={file}", "data.eval=null")
    assert run.exit_code != 0
    assert "comes with 1 images, but this model takes exactly 0" in " ".join(run.errors.split())
