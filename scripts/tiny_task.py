"""The numbers task of the tiny model: which prompts exist, how a prompt is drawn, and the shipped
prompt files.

In goes a seed, out come `unirl/assets/numbers/{train,heldout}.jsonl` (run the file) and clean
renders for pretraining (import it). Texts are the numbers 10 to 999; 200 of them are held out of
training prompts and of pretraining.

    python scripts/tiny_task.py

The only font is DejaVu Sans Bold, found inside the matplotlib package (Bitstream Vera licence: use
and rendering are free). The font file is not shipped, only pixels drawn with it.
"""

import importlib.util
import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

ASSETS = Path(__file__).resolve().parents[1] / "unirl" / "assets" / "numbers"
WIDTH, HEIGHT = 32, 16
FONT_SIZES = (13, 14)
SEED = 2025
NUM_HELDOUT_TEXTS, NUM_TRAIN_RECORDS, NUM_HELDOUT_RECORDS = 200, 2000, 256

_COLORS = json.loads((ASSETS / "colors.json").read_text())
TEXT_COLORS: dict[str, tuple[int, int, int]] = {k: tuple(v) for k, v in _COLORS["text"].items()}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    k: tuple(v) for k, v in _COLORS["background"].items()
}
VOCABULARY = (
    "<pad>",
    *("the", "number", "in", "on"),
    *dict.fromkeys([*TEXT_COLORS, *BACKGROUNDS]),
    *"0123456789",
)


@dataclass(frozen=True)
class Picture:
    """What an image should show."""

    text: str
    text_color: str
    background: str

    @property
    def prompt(self) -> str:
        return f'the number "{self.text}" in {self.text_color} on {self.background}'


def split_texts() -> tuple[list[str], list[str]]:
    """(train texts, held-out texts): disjoint, both sorted by value."""
    texts = [str(number) for number in range(10, 1000)]
    heldout = set(random.Random(SEED).sample(texts, NUM_HELDOUT_TEXTS))
    return [t for t in texts if t not in heldout], [t for t in texts if t in heldout]


def draw_pictures(texts: list[str], count: int, seed: int) -> list[Picture]:
    """`count` distinct pictures in a seeded order."""
    everything = [Picture(t, c, b) for t in texts for c in TEXT_COLORS for b in BACKGROUNDS]
    return random.Random(seed).sample(everything, count)


@cache
def _glyphs(text: str, size: int) -> Image.Image:
    """Tight grey mask of the text."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("The font comes with matplotlib. Run: pip install matplotlib")
    fonts = spec.submodule_search_locations[0]
    font = ImageFont.truetype(f"{fonts}/mpl-data/fonts/ttf/DejaVuSans-Bold.ttf", size)
    left, top, right, bottom = map(int, font.getbbox(text))
    mask = Image.new("L", (right - left, bottom - top), 0)
    ImageDraw.Draw(mask).text((-left, -top), text, fill=255, font=font)
    return mask


def render(picture: Picture, rng: random.Random) -> np.ndarray:
    """uint8 [H, W, 3] image; `rng` draws size and offset (1 pixel at most, never cropped)."""
    glyphs = _glyphs(picture.text, rng.choice(FONT_SIZES))
    free_x, free_y = WIDTH - glyphs.width, HEIGHT - glyphs.height
    x = min(max(free_x // 2 + rng.randint(-1, 1), 0), free_x)
    y = min(max(free_y // 2 + rng.randint(-1, 1), 0), free_y)
    image = Image.new("RGB", (WIDTH, HEIGHT), BACKGROUNDS[picture.background])
    image.paste(TEXT_COLORS[picture.text_color], (x, y), glyphs)
    return np.asarray(image)


def write_records(path: Path, pictures: list[Picture]) -> None:
    """One JSON record per line: the prompt and what a reward needs to know."""
    with path.open("w") as file:
        for picture in pictures:
            file.write(json.dumps({"prompt": picture.prompt, "metadata": vars(picture)}) + "\n")


def main() -> None:
    train_texts, heldout_texts = split_texts()
    write_records(ASSETS / "train.jsonl", draw_pictures(train_texts, NUM_TRAIN_RECORDS, SEED + 1))
    write_records(
        ASSETS / "heldout.jsonl", draw_pictures(heldout_texts, NUM_HELDOUT_RECORDS, SEED + 2)
    )


if __name__ == "__main__":
    main()
