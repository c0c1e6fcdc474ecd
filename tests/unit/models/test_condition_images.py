"""Images that prompts come with are opened as they should be seen, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from unirl.core.errors import DataError
from unirl.core.types import PromptRecord
from unirl.models.condition_images import image_sizes, open_images, require_images


def record(*images: Path) -> PromptRecord:
    return PromptRecord("id", "make it red", images=tuple(str(image) for image in images))


def test_images_come_in_their_order_as_rgb(tmp_path: Path) -> None:
    Image.new("L", (4, 6), 7).save(tmp_path / "grey.png")
    Image.new("RGBA", (8, 2), (1, 2, 3, 0)).save(tmp_path / "clear.png")
    grey, clear = open_images(record(tmp_path / "grey.png", tmp_path / "clear.png"))
    assert (grey.mode, grey.size, grey.getpixel((0, 0))) == ("RGB", (4, 6), (7, 7, 7))
    assert (clear.mode, clear.size, clear.getpixel((0, 0))) == ("RGB", (8, 2), (1, 2, 3))


def test_a_photograph_taken_sideways_is_turned_upright(tmp_path: Path) -> None:
    orientation, quarter_turn = 0x0112, 6
    exif = Image.Exif()
    exif[orientation] = quarter_turn
    Image.new("RGB", (4, 6)).save(tmp_path / "photo.jpg", exif=exif)
    photo = record(tmp_path / "photo.jpg")
    (image,) = open_images(photo)
    assert [image.size] == image_sizes(photo) == [(6, 4)]


def test_a_prompt_without_images_has_none() -> None:
    assert open_images(record()) == []


@pytest.mark.parametrize(
    ("content", "told"), [(None, "is no file"), (b"not a picture", "cannot be read")]
)
def test_a_file_that_is_no_image_is_named(tmp_path: Path, content: bytes | None, told: str) -> None:
    file = tmp_path / "cat.png"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=f"make it red.*cat.png {told}"):
        open_images(record(file))


def test_half_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    Image.effect_noise((64, 64), 50).save(file)
    file.write_bytes(file.read_bytes()[:600])
    with pytest.raises(DataError, match="cannot be read"):
        open_images(record(file))


@pytest.mark.parametrize(("allowed", "told"), [(range(1, 2), "exactly 1"), (range(1, 4), "1 to 3")])
def test_a_wrong_number_of_images_is_refused(allowed: range, told: str) -> None:
    one = record(Path("a.png"))
    require_images([one], allowed, "data.train")
    with pytest.raises(DataError, match=f"data.train: prompt 'make it red' .* 0 images.*{told}"):
        require_images([one, record()], allowed, "data.train")
