"""Scores whether an image of text has the ink and the background colour that its prompt asks for.

In go one uint8 RGB image and the two wanted colours, out comes a number from 0 to 1: half for the
background, half for the ink. It knows nothing about what the text says, so it is blind to spelling
as OCR is blind to colour.
"""

import numpy as np

INK_FRACTION = 0.06
"""Share of pixels taken as ink: fewer than the strokes of two digits, so soft edges stay out."""
COLOR_TOLERANCE = 40.0
"""RGB distance (0 to 441) at which closeness reaches 0. Strict on purpose: a drift too small to
bother the eye must move the score, or a policy could trade colour for spelling free of charge."""

Rgb = tuple[int, int, int]


def color_score(image: np.ndarray, text_rgb: Rgb, background_rgb: Rgb) -> float:
    """Mean closeness of background and ink to the wanted colours. image: uint8 [3, H, W] RGB."""
    pixels = np.asarray(image).astype(np.float32)
    background = np.median(border(pixels), axis=0)
    ink = farthest_from(background, pixels.reshape(3, -1).T)
    return float(
        0.5 * closeness(background, background_rgb) + 0.5 * closeness(ink, text_rgb).mean()
    )


def border(pixels: np.ndarray) -> np.ndarray:
    """[P, 3] pixels on the outermost ring of a [3, H, W] image."""
    sides = (pixels[:, 0], pixels[:, -1], pixels[:, 1:-1, 0], pixels[:, 1:-1, -1])
    return np.concatenate(sides, axis=1).T


def farthest_from(color: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """[P, 3] pixels that differ most from a colour: the ink, if the colour is the background."""
    distance = np.linalg.norm(pixels - color, axis=-1)
    count = max(1, round(INK_FRACTION * len(pixels)))
    return pixels[np.argsort(-distance, kind="stable")[:count]]


def closeness(colors: np.ndarray, wanted: Rgb) -> np.ndarray:
    """1 for the wanted colour, falling linearly to 0 at COLOR_TOLERANCE. colors: [..., 3]."""
    distance = np.linalg.norm(colors - np.asarray(wanted, np.float32), axis=-1)
    return np.maximum(0.0, 1.0 - distance / COLOR_TOLERANCE)
