"""Colour of text and background against the prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from unirl.config.resources import resolve_path
from unirl.core.types import PromptRecord
from unirl.reward.color_match import color_scores
from unirl.reward.scorer import DifferentiableScorer


class ColorScorer(DifferentiableScorer):
    """Half closeness of the background colour, half of the text colour, in [0, 1]."""

    def __init__(self, colors: str = "pkg:numbers/colors.json") -> None:
        """`colors`: JSON file {"text": {name: [r, g, b]}, "background": {...}}."""
        table = json.loads(Path(resolve_path(colors)).read_text())
        self._text_colors = table["text"]
        self._backgrounds = table["background"]

    def required_metadata(self) -> Sequence[str]:
        return ("text_color", "background")

    def score_differentiable(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        """[B] scores; only colours within COLOR_TOLERANCE of the wanted one have a gradient."""
        text = _wanted(self._text_colors, "text_color", records)
        background = _wanted(self._backgrounds, "background", records)
        return color_scores(images * 255, text.to(images.device), background.to(images.device))


def _wanted(
    table: Mapping[str, Sequence[int]], field: str, records: Sequence[PromptRecord]
) -> Tensor:
    """[B, 3] float32 colours that the records name."""
    for record in records:
        name = record.metadata[field]
        if name not in table:
            known = ", ".join(table)
            raise ValueError(f"{record.text!r} has metadata.{field}={name!r}; known are {known}")
    rows = [table[record.metadata[field]] for record in records]
    return torch.tensor(rows, dtype=torch.float32).view(-1, 3)
