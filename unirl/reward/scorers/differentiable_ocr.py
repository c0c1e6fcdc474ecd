"""How surely an OCR network finds the wanted text, as a reward with a gradient to the pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unirl.core.components import Component
from unirl.core.types import PromptRecord
from unirl.memory.movers import module_components
from unirl.reward.ocr_model import bundled_model_path
from unirl.reward.scorer import DifferentiableScorer
from unirl.reward.torch_ocr import TextRecognizer


class OcrCtcScorer(DifferentiableScorer):
    """1 + log p(metadata.text | image) / (length ln N), N the symbols the network tells apart.

    1 where the text is certain, 0 where each of its characters is as likely as any other symbol,
    below 0 where the network is sure of another text. p sums over all alignments (CTC). Linear in
    the log and without a floor, since p itself and a floor have next to no gradient in images
    that cannot be read yet, which need it most.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = torch.device(device)
        self._recognizer = TextRecognizer(bundled_model_path()).to(self._device)
        self._nats_of_a_guess = math.log(self._recognizer.num_symbols)

    def components(self) -> Sequence[Component]:
        return module_components("network", self._recognizer)

    def required_metadata(self) -> Sequence[str]:
        return ("text",)

    def score_differentiable(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        texts = [str(record.metadata["text"]) for record in records]
        log_probs = self._recognizer.log_prob_per_character(images.to(self._device), texts)
        return (1 + log_probs / self._nats_of_a_guess).to(images.device)
