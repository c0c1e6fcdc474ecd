"""Picture sheets show every image, unsmoothed, and are written completely or not at all."""

import numpy as np
import pytest
from PIL import Image

from unirl.core.errors import UnirlError
from unirl.tracking.media import save_before_after, save_grid

RED, BLUE = (255, 0, 0), (0, 0, 255)


def plain(colour, count=1, height=4, width=8):
    return np.full((count, height, width, 3), colour, dtype=np.uint8)


def pixels_of(path, colour) -> np.ndarray:
    """[N, 2] positions (y, x) of a colour."""
    return np.argwhere((np.asarray(Image.open(path)) == colour).all(axis=-1))


def test_images_are_enlarged_without_smoothing(tmp_path):
    checks = np.zeros((1, 2, 2, 3), dtype=np.uint8)
    checks[0, 0, 0], checks[0, 1, 1] = RED, RED
    checks[0, 0, 1], checks[0, 1, 0] = BLUE, BLUE
    save_grid(checks, [""], tmp_path / "grid.png", scale=5, columns=1)
    assert len(pixels_of(tmp_path / "grid.png", RED)) == 2 * 5 * 5
    assert len(pixels_of(tmp_path / "grid.png", BLUE)) == 2 * 5 * 5


def test_a_grid_holds_every_image_in_reading_order(tmp_path):
    shades = [(10 * i + 5, 0, 0) for i in range(5)]
    images = np.concatenate([plain(shade) for shade in shades])
    save_grid(images, [f"image {i}" for i in range(5)], tmp_path / "grid.png", 2, columns=3)
    corners = [tuple(pixels_of(tmp_path / "grid.png", shade).min(axis=0)) for shade in shades]
    assert all(len(pixels_of(tmp_path / "grid.png", s)) == 4 * 8 * 4 for s in shades)
    assert corners == sorted(corners)
    assert len({y for y, _ in corners}) == 2


def test_captions_are_drawn_below_and_never_cut_the_image(tmp_path):
    long = "a long caption of many words " * 10 + "x" * 200
    for name, caption in (("none", ""), ("long", long)):
        save_grid(plain(BLUE), [caption], tmp_path / f"{name}.png", 3, columns=1)
    with Image.open(tmp_path / "long.png") as sheet:
        ink = (np.asarray(sheet).max(axis=-1) < 100).sum()
        assert sheet.height < 4 * 3 + 100, "cut after three lines"
    assert ink > 100
    assert len(pixels_of(tmp_path / "long.png", BLUE)) == 4 * 8 * 9


@pytest.mark.parametrize("count", [1, 2, 7, 16])
@pytest.mark.parametrize("scale", [1, 6])
def test_before_stands_left_of_after(tmp_path, count, scale):
    path = tmp_path / "pairs.png"
    captions = [f"prompt {i}" for i in range(count)]
    save_before_after(plain(RED, count), plain(BLUE, count), captions, path, scale)
    before, after = pixels_of(path, RED), pixels_of(path, BLUE)
    assert len(before) == len(after) == count * 4 * 8 * scale**2
    assert tuple(before[0]) < tuple(after[0])
    # The pixel rows are shared: equal heights, and every column of pairs starts with "before".
    assert (np.unique(before[:, 0]) == np.unique(after[:, 0])).all()
    assert before[:, 1].min() < after[:, 1].min()


def test_a_different_number_of_captions_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="zip"):
        save_grid(plain(RED, 2), ["only one"], tmp_path / "grid.png", 1, 1)


def test_a_failed_write_keeps_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "grid.png"
    save_grid(plain(RED), [""], path, 1, 1)
    before = path.read_bytes()

    def half(self, target, *args, **kwargs):
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", half)
    with pytest.raises(UnirlError, match=r"grid\.png cannot be written: No space left"):
        save_grid(plain(BLUE), [""], path, 1, 1)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["grid.png"]
