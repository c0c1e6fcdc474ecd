"""Colour of text and background against the prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from unirl.config.resources import resolve_path
from unirl.core.types import PromptRecord
from unirl.reward.color_match import color_score
from unirl.reward.scorer import Scorer


class ColorScorer(Scorer):
    """Half closeness of the background colour, half of the text colour, in [0, 1]."""

    def __init__(self, colors: str = "pkg:numbers/colors.json") -> None:
        """`colors`: JSON file {"text": {name: [r, g, b]}, "background": {...}}."""
        table = json.loads(Path(resolve_path(colors)).read_text())
        self._text_colors = table["text"]
        self._backgrounds = table["background"]

    def required_metadata(self) -> Sequence[str]:
        return ("text_color", "background")

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> list[float]:
        return [
            color_score(
                image,
                self._text_colors[record.metadata["text_color"]],
                self._backgrounds[record.metadata["background"]],
            )
            for image, record in zip(images.numpy(), records, strict=True)
        ]
