"""What the installed command `unirl` calls: `cli.main`, which takes a third of a second to import.

A Ctrl-C meanwhile ends the command as a later one does.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        from unirl.cli.main import main as command

        return command(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def end_process(exit_code: int) -> NoReturn:
    """End this process, which a launcher may have started as a rank; all is closed by now."""
    if "RANK" in os.environ:
        # Threads of torch's process groups can abort an interpreter that takes itself apart
        # (std::terminate), and a run that went well would end as a failure.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
