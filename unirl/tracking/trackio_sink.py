"""Rows and pictures to trackio, on by `logging.report_to_trackio`. trackio is imported on use.

Everything stays on this machine, in trackio's own folder (TRACKIO_DIR), unless the environment says
otherwise (TRACKIO_SPACE_ID). No dashboard is started: `trackio show` does that. The step is the
number of rollouts done; optimizer steps are a column beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import redirect_stdout
from contextvars import copy_context
from io import StringIO
from pathlib import Path
from typing import Any

from unirl.core.errors import UnirlError
from unirl.tracking.tracker import Panel, Row, Sink


class TrackioSink(Sink):
    """One trackio run, which a resume in the same run directory goes on with.

    trackio knows runs by name, so the name has a mark of the directory: two runs of one name in two
    folders stay apart.

    Raises:
        UnirlError: trackio is missing or refuses to start.
    """

    def __init__(
        self, project: str, run_name: str, directory: Path, config: Mapping[str, Any], resumes: bool
    ) -> None:
        try:
            import trackio

            self._trackio = trackio
            with redirect_stdout(StringIO()):  # it would print how to open a dashboard
                # In a context of its own: trackio would finish its current run at exit once more.
                self._run = copy_context().run(
                    trackio.init,
                    project=project,
                    name=trackio_name(run_name, directory),
                    config=dict(config),
                    resume="allow" if resumes else "never",
                    embed=False,
                    # The machine's own load is no metric of the run.
                    auto_log_cpu=False,
                    auto_log_gpu=False,
                )
        except Exception as error:
            raise UnirlError(
                f"logging.report_to_trackio=true, but trackio did not start: {error}\n"
                "Install it with pip install 'unirl[trackio]', or set "
                "logging.report_to_trackio=false."
            ) from error

    def log(self, row: Row) -> None:
        metrics = {name: float(value) for name, value in row.metrics.items()}
        self._run.log({**metrics, **row.axes()}, step=row.rollouts_done)

    def show(self, panel: Panel) -> None:
        images = {
            tag: self._trackio.Image(str(picture.path), caption=picture.caption)
            for tag, picture in panel.tagged()
        }
        self._run.log(images, step=panel.rollouts_done)

    def close(self) -> None:
        self._run.finish()


def trackio_name(run_name: str, directory: Path) -> str:
    """ "quickstart-3f2a91": the run's name and a mark of where it lies."""
    mark = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:6]
    return f"{run_name}-{mark}"
