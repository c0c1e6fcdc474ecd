"""`python -m killed_runs DIRECTORY NUM_KILLS SEED WORD...`: one run, killed again and again.

Each attempt is `unirl train WORD...` in a fork of this process and dies by SIGKILL, half of them
at a random file operation in the run directory, half after a random time; the last one may end.
Prints the number of attempts that were killed and the exit code of the last.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

from unirl.cli.main import main

MOST_OPERATIONS = 50
"""About what is made from one checkpoint to the next."""
MOST_SECONDS = 1.5
"""About what that takes, and loading before it."""


def attempt(directory: Path, words: list[str], operation: int | None, seconds: float) -> int:
    """Wait status of `unirl train`, killed at that file operation, or so long after the first."""
    pid = os.fork()
    if pid == 0:
        log = os.open(directory.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.addaudithook(_Killer(str(directory), operation, seconds))
        os._exit(main(["train", *words]))
    return os.waitpid(pid, 0)[1]


class _Killer:
    def __init__(self, directory: str, operation: int | None, seconds: float) -> None:
        self.directory = directory
        self.operation = operation
        self.seconds = seconds
        self.count = 0

    def __call__(self, event: str, args: tuple[object, ...]) -> None:
        if event.split(".")[0] not in ("open", "os", "shutil"):
            return
        if not any(self.directory in str(one) for one in args if isinstance(one, str | Path)):
            return
        self.count += 1
        if self.count == 1 and self.seconds:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self.seconds)  # ends it without a handler
        if self.count == self.operation:
            os.kill(os.getpid(), signal.SIGKILL)


def run_to_the_end() -> None:
    directory, num_kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    words = sys.argv[4:]
    chance = random.Random(seed)
    killed = 0
    for number in range(num_kills):
        by_operation = number % 2 == 0
        status = attempt(
            directory,
            words,
            chance.randrange(1, MOST_OPERATIONS) if by_operation else None,
            0.0 if by_operation else chance.uniform(0.1, MOST_SECONDS),
        )
        killed += os.WIFSIGNALED(status)
    status = attempt(directory, words, None, 0.0)
    print(killed, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    run_to_the_end()
