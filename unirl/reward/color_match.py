"""Scores whether images of text have the ink and the background colour that their prompts ask for.

In go RGB images on the scale from 0 to 255 and the wanted colours, out comes a number from 0 to 1
per image: half for the background, half for the ink. It knows nothing about what the text says, so
it is blind to spelling as OCR is blind to colour.

Gradients to the pixels are those of the formula itself. Held constant in them are the choices made
on the way: which border pixels are the middle ones, and which pixels are ink.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

INK_FRACTION = 0.06
"""Share of pixels taken as ink: fewer than the strokes of two digits, so soft edges stay out."""
COLOR_TOLERANCE = 40.0
"""RGB distance (0 to 441) at which closeness reaches 0. Strict on purpose: a drift too small to
bother the eye must move the score, or a policy could trade colour for spelling free of charge.
A colour farther away has no gradient: the score keeps right colours and cannot find them."""

Rgb = tuple[int, int, int]


def color_scores(images: Tensor, text_rgb: Tensor, background_rgb: Tensor) -> Tensor:
    """[B] mean closeness of background and ink to the wanted colours, [B, 3] each.

    Images are [B, 3, H, W] float32, 0 to 255.
    """
    background = border(images).quantile(0.5, dim=1)
    ink = farthest_from(background, images.flatten(2).mT)
    of_ink = closeness(ink, text_rgb[:, None]).mean(dim=1)
    return 0.5 * closeness(background, background_rgb) + 0.5 * of_ink


def color_score(image: np.ndarray, text_rgb: Rgb, background_rgb: Rgb) -> float:
    """The score of one image, uint8 [3, H, W]."""
    wanted = torch.tensor([[text_rgb], [background_rgb]], dtype=torch.float32)
    return float(color_scores(torch.from_numpy(image)[None].float(), *wanted))


def border(images: Tensor) -> Tensor:
    """[B, P, 3] pixels on the outermost ring of images [B, 3, H, W]."""
    sides = (images[..., 0, :], images[..., -1, :], images[..., 1:-1, 0], images[..., 1:-1, -1])
    return torch.cat(sides, dim=-1).mT


def farthest_from(color: Tensor, pixels: Tensor) -> Tensor:
    """[B, K, 3] pixels of [B, P, 3] that differ most from a colour [B, 3]: the ink, if the colour
    is the background."""
    # Squares of uint8 differences are exact, so equal distances stay ties, broken by position.
    distance = (pixels - color[:, None]).detach().square().sum(dim=-1)
    count = max(1, round(INK_FRACTION * pixels.shape[1]))
    chosen = distance.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return pixels.gather(1, chosen[..., None].expand(-1, -1, 3))


def closeness(colors: Tensor, wanted: Tensor) -> Tensor:
    """1 for the wanted colour, falling linearly to 0 at COLOR_TOLERANCE. colors: [..., 3]."""
    distance = torch.linalg.vector_norm(colors - wanted, dim=-1)
    return (1 - distance / COLOR_TOLERANCE).clamp(min=0)
