"""What the installed command `unirl` calls: `cli.main`, which takes a third of a second to import.

A Ctrl-C meanwhile ends the command as a later one does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        from unirl.cli.main import main as command

        return command(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
