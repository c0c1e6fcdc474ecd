"""Picture sheets: samples in a grid with captions, and the same prompts before and after training.

In go uint8 arrays [B, H, W, 3], out comes one PNG. Small images are enlarged without smoothing, so
a pixel stays a pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from unirl.tracking.files import replacing

_FONT_SIZE, _HEADING_SIZE, _LINE_HEIGHT = 12, 16, 15
_MAX_CAPTION_LINES = 3
_MIN_CAPTION_WIDTH = 110
"""Cells of tiny images are widened to this, so that a caption can be read."""
_MIN_HEADING_WIDTH = 60
_MARGIN = 10
_BACKGROUND, _INK = "white", "#202020"


def save_grid(
    images: NDArray[np.uint8], captions: Sequence[str], path: Path, scale: int, columns: int
) -> None:
    """Images row by row, each above its caption.

    Args:
        images: [B, H, W, 3].
        captions: B texts; each is wrapped, and cut after three lines.
        scale: enlargement of each image.

    Raises:
        UnirlError: the file cannot be written.
    """
    cells = [_Cell([image], caption) for image, caption in zip(images, captions, strict=True)]
    _save_sheet(cells, path, scale, columns, headings=[])


def save_before_after(
    before: NDArray[np.uint8],
    after: NDArray[np.uint8],
    captions: Sequence[str],
    path: Path,
    scale: int,
) -> None:
    """Pairs of images of the same prompt, side by side under "before" and "after".

    Args:
        before, after: [B, H, W, 3], same order.
        captions: B texts.
        scale: enlargement of each image.

    Raises:
        UnirlError: the file cannot be written.
    """
    pairs = zip(before, after, captions, strict=True)
    cells = [_Cell([old, new], caption) for old, new, caption in pairs]
    columns = ceil(sqrt(len(cells) / 2))
    _save_sheet(cells, path, scale, columns, headings=["before", "after"])


@dataclass(frozen=True)
class _Cell:
    """Images side by side and the caption under them."""

    images: Sequence[NDArray[np.uint8]]
    caption: str


def _save_sheet(
    cells: Sequence[_Cell], path: Path, scale: int, columns: int, headings: Sequence[str]
) -> None:
    columns = min(columns, len(cells))
    height, width, _ = cells[0].images[0].shape
    image_width, image_height = width * scale, height * scale
    # The images of a cell stand in equal slots, wide enough for their headings.
    slot_width = max(image_width, _MIN_HEADING_WIDTH if headings else 0) + _MARGIN
    content_width = len(cells[0].images) * slot_width - _MARGIN
    cell_width = max(content_width, _MIN_CAPTION_WIDTH) + 2 * _MARGIN
    captions = [_wrap(cell.caption, cell_width - 2 * _MARGIN) for cell in cells]
    caption_height = _LINE_HEIGHT * max(len(lines) for lines in captions)
    cell_height = image_height + caption_height + 2 * _MARGIN
    top = _HEADING_SIZE + _MARGIN if headings else 0

    size = (columns * cell_width, top + ceil(len(cells) / columns) * cell_height)
    sheet = Image.new("RGB", size, _BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    for number, (cell, lines) in enumerate(zip(cells, captions, strict=True)):
        row, column = divmod(number, columns)
        x = column * cell_width + (cell_width - content_width) // 2
        y = top + row * cell_height + _MARGIN
        for offset, array in enumerate(cell.images):
            centre = x + offset * slot_width + (slot_width - _MARGIN) // 2
            enlarged = Image.fromarray(array).resize(
                (image_width, image_height), Image.Resampling.NEAREST
            )
            sheet.paste(enlarged, (centre - image_width // 2, y))
            if row == 0 and headings:
                _draw_text(draw, (centre, _MARGIN), headings[offset], _HEADING_SIZE)
        for index, line in enumerate(lines):
            below = y + image_height + 3 + index * _LINE_HEIGHT
            _draw_text(draw, (x + content_width // 2, below), line, _FONT_SIZE)
    with replacing(path) as temporary:
        sheet.save(temporary)


def _draw_text(draw: ImageDraw.ImageDraw, top: tuple[int, int], text: str, size: int) -> None:
    """Text centred below the point `top`."""
    draw.text(top, text, fill=_INK, font=_font(size), anchor="ma")


def _wrap(caption: str, width: int) -> list[str]:
    """Lines that fit into `width` pixels; line breaks of the caption are kept."""
    font = _font(_FONT_SIZE)
    lines: list[str] = []
    for paragraph in caption.split("\n"):
        line = ""
        for word in paragraph.split():
            longer = f"{line} {word}".strip()
            if line and font.getlength(longer) > width:
                lines.append(line)
                line = word
            else:
                line = longer
        lines.append(line)
    cut = lines[:_MAX_CAPTION_LINES]
    if len(lines) > len(cut):
        cut[-1] += " …"
    return [_shorten(line, width) for line in cut]


def _shorten(line: str, width: int) -> str:
    """The line, or as much of it as fits with an ellipsis."""
    font = _font(_FONT_SIZE)
    if font.getlength(line) <= width:
        return line
    line = line.removesuffix(" …")
    while line and font.getlength(line + "…") > width:
        line = line[:-1]
    return line + "…"


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
