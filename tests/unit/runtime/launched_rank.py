"""What a launched rank does in test_launch.py: `python -m launched_rank SCENARIO [FOLDER]`.

Scenarios without a process group import no torch, which would take seconds on every rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
FOLDER = Path(sys.argv[-1])
RANK_0_PRINTS_SECONDS = 1.0
"""As in unirl.cli.main."""


def greet() -> int:
    """Everything that a rank gets to know, printed."""
    print(f"out {RANK}", sys.argv[1:], os.environ["OMP_NUM_THREADS"], sys.stdout.isatty())
    print(f"err {RANK}", file=sys.stderr)
    return 0


def refuse() -> int:
    """Each rank finds the same wrong configuration, and rank 0 prints it."""
    if RANK == 0:
        print("error: set a", file=sys.stderr)
    else:
        time.sleep(RANK_0_PRINTS_SECONDS)
    return 3


def stop_slowly() -> int:
    """Ends by itself when the test says that the work in hand is done."""
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: signals.append(number))
    mark("ready")
    while not signals:
        time.sleep(0.02)
    mark("stopping")
    while not (FOLDER / "finish").exists():
        time.sleep(0.02)
    assert len(signals) == 1
    mark("saved")
    # As ranks of a run do: when one has left, torch's launcher ends the others with a signal.
    while len(list(FOLDER.glob("saved-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    return 128 + signals[0]


def be_interrupted() -> int:
    """As a command that knows nothing of signals, but is watched."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        mark("ready")
        time.sleep(600)
    except KeyboardInterrupt:
        return 130
    return 0


def train() -> int:
    """A rank under watch: all meet in a collective, and rank 2 has its own scenario."""
    import torch
    import torch.distributed as dist

    from unirl.core.errors import UnirlError
    from unirl.distributed.group import joined
    from unirl.distributed.watch import watching
    from unirl.runtime.interrupt import GracefulStop
    from unirl.tracking.console import setup_rank_logging

    if RANK != 0:
        setup_rank_logging(FOLDER, RANK)
    try:
        with joined() as ranks, GracefulStop(), watching(ranks):
            mark("ready")
            ranks.barrier()  # behind it, all ranks are known to the test
            if RANK == 2 and "raise" in sys.argv:
                raise ValueError("bad weather")
            if RANK == 2:
                (FOLDER / "pid").write_text(str(os.getpid()))
                time.sleep(600)
            dist.all_reduce(torch.ones(1))
    except UnirlError as error:
        if RANK == 0:
            print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def mark(name: str) -> None:
    (FOLDER / f"{name}-{RANK}").write_text(str(os.getpid()))


if __name__ == "__main__":
    scenarios = (greet, refuse, stop_slowly, be_interrupted, train)
    sys.exit({one.__name__: one for one in scenarios}[sys.argv[1]]())
