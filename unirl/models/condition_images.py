"""The images that a prompt comes with, for families that edit or continue them.

In goes a prompt record, whose `images` name files, out come pictures in RGB, upright. Sizes are as
in the files: each family makes them fit as its pipeline does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from PIL import ExifTags, Image, ImageOps

from unirl.core.errors import DataError
from unirl.core.types import PromptRecord

T = TypeVar("T")


def open_images(record: PromptRecord) -> list[Image.Image]:
    """The record's images in its order, as diffusers' `load_image` opens them.

    Raises DataError naming the prompt and the file that is missing or no image.
    """
    return [_open(path, record, _upright) for path in record.images]


def image_sizes(record: PromptRecord) -> list[tuple[int, int]]:
    """(width, height) of each, from the files' headers. Raises DataError like `open_images`."""
    return [_open(path, record, _size) for path in record.images]


def require_images(records: Sequence[PromptRecord], allowed: range, key: str) -> None:
    """Raise DataError naming `key` and the first prompt that has too few or too many images."""
    for record in records:
        if len(record.images) not in allowed:
            raise DataError(
                f"{key}: prompt {record.text!r} comes with {len(record.images)} images, but this "
                f"model takes {_told(allowed)}. Correct 'images' of the record, or set "
                "model.family to a family that takes so many."
            )


def _upright(image: Image.Image) -> Image.Image:
    return ImageOps.exif_transpose(image).convert("RGB")


def _size(image: Image.Image) -> tuple[int, int]:
    lies_on_its_side = image.getexif().get(ExifTags.Base.Orientation, 1) > 4
    return (image.height, image.width) if lies_on_its_side else image.size


def _open(path: str, record: PromptRecord, reader: Callable[[Image.Image], T]) -> T:
    """reader(image), every failure told as a DataError."""
    try:
        with Image.open(path) as image:
            return reader(image)
    except FileNotFoundError:
        raise DataError(
            f"prompt {record.text!r}: its image {path} is no file. Correct 'images' of the record."
        ) from None
    # Pillow raises OSError for most damaged files, and others for some.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"prompt {record.text!r}: its image {path} cannot be read: {error}. Save it again as "
            "PNG or JPEG, or correct 'images' of the record."
        ) from error


def _told(allowed: range) -> str:
    fewest, most = allowed[0], allowed[-1]
    return f"exactly {fewest}" if fewest == most else f"{fewest} to {most}"
