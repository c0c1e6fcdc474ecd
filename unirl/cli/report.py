"""`unirl report`: one HTML page about a run, or about several beside each other.

Exit codes: 0 written, 1 a folder is no run, several runs have no output, the output is something
else than a report, or the disk refused.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(command: argparse.ArgumentParser) -> None:
    """The arguments of `unirl report`."""
    command.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="run directories")
    command.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where the page goes, *.html: a new file, or a report to replace; needed for several "
        "runs, default report.html in the run",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    from unirl.report.page import write_report  # imports Jinja and Pillow

    path = write_report(args.runs, args.output)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB): open it in a browser, or send it")
    return 0
