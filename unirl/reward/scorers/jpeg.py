"""JPEG size: the classic reward that needs no network (DDPO, arXiv:2305.13301)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

from PIL import Image
from torch import Tensor

from unirl.core.types import PromptRecord
from unirl.reward.scorer import Scorer


class JpegSizeScorer(Scorer):
    """Kilobytes of the image as a JPEG of quality 95, negated when smaller is wanted."""

    def __init__(self, prefer: Literal["small", "large"] = "small") -> None:
        if prefer not in ("small", "large"):
            raise ValueError(f"prefer={prefer!r}; it must be 'small' or 'large'")
        self._sign = -1 if prefer == "small" else 1

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> list[float]:
        return [self._sign * _kilobytes(image) for image in images.permute(0, 2, 3, 1).numpy()]


def _kilobytes(pixels: object) -> float:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=95)  # type: ignore[arg-type]
    return buffer.tell() / 1000
