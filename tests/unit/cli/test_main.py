"""The command line: which words mean what, exit codes, and answers without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unirl import entry
from unirl.cli.main import CLOSED_PIPE, main
from unirl.core.errors import RewardError


def test_check_summarises_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "quickstart", "num_rollouts=20"]) == 0
    text = capsys.readouterr().out
    assert "quickstart: no problems" in text
    assert "8 prompts x 16 samples = 128 images" in text
    assert "20 rollouts, 80 optimizer steps" in text


def test_check_says_who_is_parked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "diffusion/tiny/tiny_residency_gate", "reward_resident=true"]) == 0
    text = capsys.readouterr().out
    assert "train is parked while idle, rollout is parked while idle, reward stays" in text
    assert "adapter to the rollout engine every rollout" in text


def test_problems_go_to_stderr_with_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "quickstart", "sampling.eta=0", "foo=1"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: 2 problems in quickstart:\nfoo\n    is not a key.")


def test_long_messages_are_not_wrapped_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "quickstart", "stack.num_updates_per_batch=5"])
    line = "accumulate_rollouts 1 = 128 samples; / stack.num_updates_per_batch 5 = 25.60 samples"
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--config-name", "quickstart", "--cfg", "seed=3"],
        ["seed=3", "quickstart", "--cfg"],
        ["quickstart", "--cfg", "job", "--resolve", "seed=3"],
        ["--cfg", "quickstart", "+seed=3"],
    ],
)
def test_recipe_options_and_overrides_come_in_any_order(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words]) == 0
    assert "\nseed: 3\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["train"], "which recipe?"),
        (["evaluate"], "which checkpoint, run or recipe?"),
        (["check", "quickstart", "tiny"], "one recipe at a time"),
        (["train", "quickstart", "--config-nam=x"], "--config-nam=x"),
        (["recipes", "quickstart"], "unrecognized"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    words: list[str], fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert fragment in capsys.readouterr().err


def test_recipes_lists_shipped_and_own_recipes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [/quickstart]\ndescription: my own\n")
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "group.yaml").write_text("scorers: {}\n")
    assert main(["recipes", "--config-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["mine", "my", "own"]
    assert any(line.startswith("quickstart ") for line in lines)
    assert not any("group" in line for line in lines)


@pytest.mark.parametrize("command", [["recipes"], ["check", "quickstart"]], ids=" ".join)
def test_a_reader_that_went_away_ends_a_command_quietly(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = f"from unirl.cli.main import main\nraise SystemExit(main({command!r}))"
    with os.fdopen(writer) as closed:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=closed, stderr=subprocess.PIPE, timeout=60
        )
    assert (done.returncode, done.stderr) == (CLOSED_PIPE, b"")


def test_components_lists_built_in_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--components"]) == 0
    text = capsys.readouterr().out
    for name in ("trainside", "replica", "flow_grpo", "jpeg_size", "sd3"):
        assert name in text


def test_own_classes_are_found_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_here.py").write_text("class Sharpness:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    own = "reward.scorers.sharp.path=rewards_here:Sharpness"
    assert main(["check", "quickstart", own]) == 0


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [(RewardError("scorer ocr returned nan"), 1), (KeyboardInterrupt(), 130)],
)
def test_a_failed_or_interrupted_run_has_its_own_exit_code(
    error: BaseException, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr("unirl.cli.main._train", fail)
    assert entry.main(["train", "quickstart"]) == exit_code


@pytest.mark.parametrize(
    "words",
    [
        ["recipes"],
        ["recipes", "--components"],
        ["check", "quickstart"],
        ["check", "diffusion/sd3/sd3_replica_lora"],
        ["check", "quickstart", "foo=1"],
        ["train", "quickstart", "--cfg"],
        ["--help"],
    ],
    ids=" ".join,
)
def test_answers_come_without_torch(words: list[str]) -> None:
    code = (
        "import sys\nfrom unirl.cli.main import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'peft', 'wandb', 'matplotlib'}\n"
        "sys.exit(f'imported {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "unirl.train_diffusion"],
        ["-c", "from unirl.entry import main; raise SystemExit(main())"],
    ],
)
def test_ctrl_c_within_the_imports_ends_without_a_traceback(
    words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'unirl.cli.check':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
    )
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_help_ends_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "unirl train quickstart" in capsys.readouterr().out.partition("examples:")[2]


def test_the_public_systems_module_name_trains() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "unirl.train_diffusion", "--config-name", "quickstart", "--cfg"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert "run_name: quickstart" in done.stdout
