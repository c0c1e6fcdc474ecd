"""The file a page goes to: a new one, or a report that is there already and is replaced."""

from __future__ import annotations

from pathlib import Path

from unirl.core.errors import UnirlError

GENERATOR = "unirl report"
"""What the page names as its maker, with the version behind it."""
_MARK = b'<meta name="generator" content="unirl '
_HEAD_BYTES = 2000
"""The mark stands before the title, so before anything that comes from a run."""


def require_replaceable(path: Path) -> None:
    """Refuse a target that is no HTML file, a folder, or a file that is no report.

    Raises:
        UnirlError: with what was found there.
    """
    if path.is_dir():
        raise UnirlError(
            f"{path} is a folder, and a report is a file. "
            f"Name the file with --output: {path / 'report.html'}."
        )
    if path.suffix.lower() not in (".html", ".htm"):
        raise UnirlError(
            f"A report is an HTML page, and {path} has not the name of one. "
            f"Let --output end in .html: {path.with_suffix('.html')}."
        )
    if path.exists() and not _is_report(path):
        raise UnirlError(
            f"{path} exists and was not made by unirl report, so it is left as it is. "
            "Name another file with --output, or remove that one."
        )


def _is_report(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return _MARK in file.read(_HEAD_BYTES)
    except OSError as error:
        raise UnirlError(
            f"{path} exists and cannot be read ({error.strerror or error}), so it is left as it "
            "is. Name another file with --output."
        ) from error
