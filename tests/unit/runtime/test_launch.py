"""The launcher as users meet it: a process of its own, with ranks that play a scenario."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

HANG_SECONDS = 60
"""What a test waits for at most, with room for the start of the ranks on a busy machine."""
LAUNCHER = (
    "import sys; from unirl.runtime.launch import launch; "
    "sys.exit(launch(sys.argv[2:], int(sys.argv[1]), module='launched_rank'))"
)
FOLDERS = (Path(__file__).parent, Path(__file__).parents[3])


def test_ranks_get_the_words_and_rank_0_the_terminal(tmp_path: Path) -> None:
    terminal, slave = pty.openpty()
    with launched(2, "greet", "seed=3", stdout=slave) as process:
        _, errors = process.communicate(timeout=HANG_SECONDS)
    os.close(slave)
    printed = os.read(terminal, 10_000).decode()
    os.close(terminal)
    assert process.returncode == 0
    assert printed.splitlines()[0] == "out 0 ['greet', 'seed=3'] 1 True"
    assert "out 1" not in printed
    assert errors == "err 0\n"


def test_a_refused_configuration_is_printed_once() -> None:
    with launched(2, "refuse") as process:
        output, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 3
    assert (output, errors) == ("", "error: set a\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_lets_ranks_finish(tmp_path: Path, number: signal.Signals) -> None:
    with launched(2, "stop_slowly", str(tmp_path)) as process:
        await_files(tmp_path, "ready", 2)
        process.send_signal(number)
        await_files(tmp_path, "stopping", 2)
        (tmp_path / "finish").touch()
        output, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 128 + number
    assert (output, errors) == ("", "")
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_that_a_signal_interrupts_end_with_its_exit_code(
    tmp_path: Path, number: signal.Signals
) -> None:
    with launched(2, "be_interrupted", str(tmp_path)) as process:
        await_files(tmp_path, "ready", 2)
        process.send_signal(number)
        process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 128 + number


def test_the_second_signal_ends_all_ranks_at_once(tmp_path: Path) -> None:
    with launched(2, "stop_slowly", str(tmp_path)) as process:
        await_files(tmp_path, "ready", 2)
        process.send_signal(signal.SIGTERM)
        await_files(tmp_path, "stopping", 2)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130
    assert (output, errors) == ("", "interrupted\n")
    assert not list(tmp_path.glob("saved-*"))
    await_end(tmp_path, 2)


def test_an_error_of_one_rank_is_reported_first_and_ends_all(tmp_path: Path) -> None:
    with launched(3, "train", "raise", str(tmp_path)) as process:
        output, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1
    assert output == ""
    lines = errors.splitlines()
    assert lines[0] == "error: rank 2: ValueError: bad weather"
    assert lines[1] == "rank 2 failed:"
    assert lines[-1] == "ValueError: bad weather"
    assert errors.count("Traceback") == 1
    assert "ValueError: bad weather" in (tmp_path / "logs" / "rank-2.log").read_text()
    assert "ChildFailedError" not in errors
    await_end(tmp_path, 3)


def test_a_killed_rank_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    with launched(3, "train", str(tmp_path)) as process:
        await_files(tmp_path, "pid", 1)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        output, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1
    assert output == ""
    lines = errors.splitlines()
    assert len(lines) == 2, errors
    assert lines[0].startswith("error: lost contact with another rank, which was probably killed")
    assert lines[1] == "error: rank 2 was killed by SIGKILL (out of memory?)"
    await_end(tmp_path, 3)


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    with launched(3, "train", str(tmp_path)) as process:
        await_files(tmp_path, "pid", 1)
        process.kill()
        await_end(tmp_path, 3)


@contextmanager
def launched(
    num_devices: int, *words: str, stdout: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, FOLDERS))}
    environment.pop("OMP_NUM_THREADS", None)
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(num_devices), *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def await_files(folder: Path, name: str, count: int) -> None:
    """Wait for something that each of `count` ranks leaves behind."""
    deadline = time.monotonic() + HANG_SECONDS
    while len([path for path in folder.glob(f"{name}*") if path.stat().st_size]) < count:
        assert time.monotonic() < deadline, f"fewer than {count} ranks came to {name!r}"
        time.sleep(0.02)


def await_end(folder: Path, count: int) -> None:
    """Wait until all ranks that were ready are gone."""
    pids = [int(path.read_text()) for path in folder.glob("ready-*")]
    assert len(pids) == count
    ranks = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(ranks, timeout=HANG_SECONDS)
    assert not [rank for rank in alive if rank.status() != psutil.STATUS_ZOMBIE]
