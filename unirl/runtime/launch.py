"""Start the ranks of a run on this machine, with torch's own launcher, and wait for them.

Takes the words of a command and the number of ranks, gives the exit code of the run. Rank 0 has
the terminal; what other ranks print is dropped, and their stderr kept aside for the one that fails
first. Torch gives every rank a session of its own, so Ctrl-C reaches this process alone, which
hands it on.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil
from rich.console import Console
from rich.text import Text
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from unirl.runtime.interrupt import (
    CONDITION_MET,
    HUNG_UP,
    INTERRUPTED,
    OUT_OF_TIME,
    TERMINATED,
    stop_signals,
)

TORCH_HANDLES = signal.SIGQUIT
"""Torch hands this to the ranks and ends."""
STOPPED = (INTERRUPTED, TERMINATED, HUNG_UP, OUT_OF_TIME, CONDITION_MET)
"""Exit codes of ranks that were asked to stop, or found what stop_on says."""
EXPLAINED = (1, 3, *STOPPED)
"""Exit codes of ranks that have said why."""
MAX_LINES = 100
"""Of a failed rank's stderr: a traceback, not the warnings of an hour."""


def launch(words: Sequence[str], num_devices: int, *, module: str = "unirl.train_diffusion") -> int:
    """Run `python -m module *words` as `num_devices` ranks; the exit code of the run.

    That is 0, or the code of the rank that failed first, or 1 where a signal killed that rank.
    SIGINT, SIGTERM or SIGHUP to this process is handed to the ranks once, and they may take their
    time; a second one kills them. No rank outlives the call. Must run in the main thread.

    Sets OMP_NUM_THREADS=1 for the ranks, as torchrun does, unless it is set: as many threads as
    cores on each rank would slow all of them down.
    """
    _silence_torch_launcher()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arguments = ["-m", module, *words]
    run_id = uuid.uuid4().hex
    stop = _Stop(run_id)
    with tempfile.TemporaryDirectory(prefix="unirl-") as folder, _only_while_running(stop):
        try:
            launch_agent(_launch_config(num_devices, run_id, folder), sys.executable, arguments)
            return 0
        except ChildFailedError as error:
            rank, failure = _first_failure(error.failures)
            return _report(rank, failure, Path(folder), stop)
        except KeyboardInterrupt:
            return _interrupted(stop)
        except SignalException as error:
            _print_error(f"stopped by {error.sigval.name}")
            return 1


class _Stop:
    """Handler of SIGINT, SIGTERM and SIGHUP: the first asks the ranks to stop, the second kills.

    Not a second SIGHUP: kernel and shell send one each."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.num_signals = 0
        self.exit_code = INTERRUPTED

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.num_signals and number == signal.SIGHUP:
            return
        self.num_signals += 1
        self.exit_code = 128 + number
        ranks = _running_ranks(self.run_id)
        if not ranks:
            raise KeyboardInterrupt
        if self.num_signals > 1:
            _kill(ranks)
            return
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, number)


@contextmanager
def _only_while_running(stop: _Stop) -> Iterator[None]:
    """Handle what asks to stop, and leave no rank behind, whatever happens."""
    stopping = stop_signals()
    previous = {number: signal.getsignal(number) for number in (*stopping, TORCH_HANDLES)}
    for number in stopping:
        signal.signal(number, stop)
    try:
        yield
    finally:
        _kill(_running_ranks(stop.run_id))
        for number, handler in previous.items():
            signal.signal(number, handler)
        # A rank that was killed could not give the cursor back that its progress bar had hidden.
        Console().show_cursor(True)


def _running_ranks(run_id: str) -> list[int]:
    """Process ids."""
    ranks = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it ended meanwhile
            if child.environ().get("TORCHELASTIC_RUN_ID") == run_id:
                ranks.append(child.pid)
    return ranks


def _kill(ranks: Sequence[int]) -> None:
    """With their own children, such as data loaders."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.killpg(rank, signal.SIGKILL)


def _launch_config(num_devices: int, run_id: str, folder: str) -> LaunchConfig:
    logs = DefaultLogsSpecs(
        log_dir=folder,
        redirects=dict.fromkeys(range(1, num_devices), Std.ERR),
        local_ranks_filter={0},  # no stdout of the others
    )
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_devices,
        logs_specs=logs,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        local_addr="localhost",  # no look-up of this machine's name, which may not resolve
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle=TORCH_HANDLES.name,
    )


def _silence_torch_launcher() -> None:
    """It tells at length what `_report` says in a line."""
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        torch_logger = logging.getLogger(name)
        torch_logger.addHandler(logging.NullHandler())
        torch_logger.propagate = False


def _first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Rank and failure. Times are whole seconds, so a recorded one goes before others."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, bool]:
        failure = item[1]
        return failure.timestamp, not _has_recorded(failure)

    return min(failures.items(), key=order)


def _has_recorded(failure: ProcessFailure) -> bool:
    """Whether the rank left torch's error file: a crash that was the first one of the run."""
    return os.path.exists(failure.error_file)


def _report(rank: int, failure: ProcessFailure, folder: Path, stop: _Stop) -> int:
    """Print what the ranks did not print themselves; the exit code."""
    if stop.num_signals > 1:
        return _interrupted(stop)
    if stop.num_signals == 1 and -failure.exitcode in stop_signals():
        return _interrupted(stop)  # it was still starting
    if failure.exitcode == INTERRUPTED and stop.num_signals:
        return stop.exit_code  # a rank that does not ask which signal ended it
    if failure.exitcode in STOPPED:  # rank 0 has said so
        return failure.exitcode
    if _has_recorded(failure):
        if rank != 0 or failure.exitcode < 0:  # else it has printed its traceback
            _print_traceback(rank, failure)
        return max(failure.exitcode, 1)  # torch may have stopped it before it could exit
    _print_stderr(rank, folder)
    if failure.exitcode < 0:
        hint = " (out of memory?)" if failure.exitcode == -signal.SIGKILL else ""
        _print_error(f"rank {rank} was killed by {failure.signal_name()}{hint}")
        return 1
    if failure.exitcode not in EXPLAINED:
        _print_error(f"rank {rank} exited with code {failure.exitcode}")
    return failure.exitcode


def _print_traceback(rank: int, failure: ProcessFailure) -> None:
    traceback = failure.error_file_data["message"]["extraInfo"]["py_callstack"]
    print(f"rank {rank} failed:\n{traceback}", end="", file=sys.stderr)


def _print_stderr(rank: int, folder: Path) -> None:
    """Rank 0 has written to the terminal itself."""
    for path in folder.glob(f"*/attempt_0/{rank}/stderr.log"):
        lines = path.read_text(errors="replace").splitlines()
        if lines:
            print(f"rank {rank} wrote:", *lines[-MAX_LINES:], sep="\n", file=sys.stderr)


def _print_error(text: str) -> None:
    message = Text.assemble(("error: ", "bold red"), text)
    Console(stderr=True, soft_wrap=True).print(message)


def _interrupted(stop: _Stop) -> int:
    Console(stderr=True).print("interrupted")
    return stop.exit_code
