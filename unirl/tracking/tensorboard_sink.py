"""Rows and pictures to TensorBoard, on by `logging.report_to_tensorboard`: event files in
`<run>/tensorboard`. tensorboard is imported on use; TensorFlow and torch are not needed.

`train/*` is drawn over optimizer steps, everything else over rollouts done.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from PIL import Image

from unirl.core.errors import UnirlError
from unirl.tracking.files import output_errors
from unirl.tracking.tracker import Panel, Row, Sink

_WINDOW_FAMILIES = ("rollout", "train", "progress", "perf", "memory", "residency")
"""Families of rows of a window; the others come from evaluations."""


class TensorBoardSink(Sink):
    """One event file per start of the run.

    Raises:
        UnirlError: tensorboard is missing, or the folder cannot be written.
    """

    def __init__(self, directory: Path, rollouts_done: int, optimizer_step: int) -> None:
        """Events that the run left beyond where it goes on now are taken back."""
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise UnirlError(
                f"logging.report_to_tensorboard=true, but tensorboard cannot be used: {error}\n"
                "Install it with pip install 'unirl[tensorboard]', or set "
                "logging.report_to_tensorboard=false."
            ) from error
        # Their types are made when they are imported.
        events: Any = event_pb2
        summaries: Any = summary_pb2
        self._event, self._summary = events.Event, summaries.Summary
        with output_errors(directory):
            _take_back(directory, rollouts_done, optimizer_step)
            self._writer = EventFileWriter(str(directory))

    def log(self, row: Row) -> None:
        # Costs are in the window's row already: an evaluation would add a second point of a step.
        shown = row.metrics.items()
        if row.kind == "eval":
            shown = [(name, value) for name, value in shown if _family(name) != "progress"]
        for name, value in shown:
            is_trained = _family(name) == "train"
            step = row.optimizer_step if is_trained else row.rollouts_done
            self._add(step, self._summary.Value(tag=name, simple_value=float(value)))
        self._writer.flush()

    def show(self, panel: Panel) -> None:
        for tag, picture in panel.tagged():
            with Image.open(picture.path) as image:
                width, height = image.size
            value = self._summary.Value(
                tag=tag,
                image=self._summary.Image(
                    width=width,
                    height=height,
                    colorspace=3,
                    encoded_image_string=picture.path.read_bytes(),
                ),
            )
            # TensorBoard keeps the first description of a tag, so what changes has no place in it.
            value.metadata.summary_description = picture.text
            self._add(panel.rollouts_done, value)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, value: Any) -> None:
        summary = self._summary(value=[value])
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))


def _take_back(directory: Path, rollouts_done: int, optimizer_step: int) -> None:
    """Write the events up to here anew and remove the files that held more.

    TensorBoard's own purge knows one step for all tags, and here `train/*` counts another one.
    """
    old = sorted(directory.glob("events.out.tfevents.*"))
    if not old:
        return
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    kept: dict[tuple[str, int], Any] = {}
    for event in (event for path in old for event in _read(path)):
        for value in event.summary.value:
            last = optimizer_step if _family(value.tag) == "train" else rollouts_done
            if _family(value.tag) not in _WINDOW_FAMILIES:
                last -= 1  # the evaluation here is made again
            if event.step <= last:
                kept[value.tag, event.step] = event
    beside = directory.with_name(f".writing-{directory.name}")
    shutil.rmtree(beside, ignore_errors=True)
    writer = EventFileWriter(str(beside))
    for event in kept.values():
        writer.add_event(event)
    writer.close()
    for path in beside.iterdir():
        path.rename(directory / path.name)
    beside.rmdir()
    # Last: a kill before leaves events twice, and the next resume keeps one of them.
    for path in old:
        path.unlink()


def _read(path: Path) -> list[Any]:
    """The events of a file; the last one may be cut short by a kill."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return list(LegacyEventFileLoader(str(path)).Load())


def _family(tag: str) -> str:
    return tag.split("/")[0]
