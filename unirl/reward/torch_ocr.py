"""How likely the PP-OCRv4 recogniser finds a text in an image, with a gradient to the pixels.

In go float images and the texts wanted, out comes the log-probability of each text. It is the
network that `ocr_model` reads with, run in torch: the same file, the same resizing, the same
indifference to upper and lower case. Where that one takes the best reading, this one scores the
wanted text, summed over all its alignments (connectionist temporal classification: Graves et al.,
ICML 2006, eq. 3).

    recognizer = TextRecognizer(bundled_model_path())
    recognizer.log_prob_per_character(images, ["374", "12"])  # [2], with gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unirl.core.errors import RewardError
from unirl.reward.ocr_model import (
    BATCH_SIZE,
    INPUT_HEIGHT,
    INPUT_WIDTH,
    make_alphabet,
    same_letter,
)
from unirl.reward.onnx_in_torch import OnnxNetwork

BLANK = 0
"""Index of the symbol that separates characters and stands for no text."""


class TextRecognizer(nn.Module):
    """Images of one line of text in, log-probabilities of symbols or of whole texts out.

    A symbol is what the reward does not tell apart: `a`, `A` and their full-width forms are one.
    """

    symbol_of_class: Tensor
    """[C] int64: the symbol of each class of the network."""

    def __init__(self, model_path: str | Path) -> None:
        super().__init__()
        self.network = OnnxNetwork(model_path)
        classes = [same_letter(c) for c in make_alphabet(self.network.metadata["character"])]
        self._symbols = {symbol: i for i, symbol in enumerate(dict.fromkeys(classes))}
        self.register_buffer("symbol_of_class", torch.tensor([self._symbols[c] for c in classes]))

    @property
    def num_symbols(self) -> int:
        return len(self._symbols)

    def log_prob_per_character(self, images: Tensor, texts: Sequence[str]) -> Tensor:
        """[B] float32: log p(text | image) / number of characters, for images as in `forward`.

        Raises RewardError for a text that is empty, that has a character the network does not
        know, or that is too long for the width of its input.
        """
        targets = [self._encode(text) for text in texts]
        log_probs = self(images)
        for text, target in zip(texts, targets, strict=True):
            _require_fits(text, target, num_steps=len(log_probs))
        lengths = torch.tensor([len(target) for target in targets])
        loss = F.ctc_loss(
            log_probs,
            torch.tensor([symbol for target in targets for symbol in target]).to(images.device),
            input_lengths=torch.full_like(lengths, len(log_probs)),
            target_lengths=lengths,
            blank=BLANK,
            reduction="none",
        )
        return -loss / lengths.to(loss.device)

    def forward(self, images: Tensor) -> Tensor:
        """[T, B, symbols] float32 log-probs; images [B, 3, H, W] float32 RGB in [0, 1]."""
        with torch.autocast(images.device.type, enabled=False):
            pixels = recognizer_pixels(images.float())
            # Small batches reuse their memory: on a CPU, 64 at once take twice as long per image.
            probs = torch.cat([self.network(part) for part in pixels.split(BATCH_SIZE)])
            return self._merge_classes(probs).log().transpose(0, 1)

    def _merge_classes(self, probs: Tensor) -> Tensor:
        """[B, T, symbols]: the classes' probabilities added up; never 0, so that the log is
        finite."""
        merged = probs.new_zeros(*probs.shape[:2], self.num_symbols)
        merged = merged.index_add(-1, self.symbol_of_class, probs)
        return merged.clamp(min=torch.finfo(probs.dtype).tiny)

    def _encode(self, text: str) -> list[int]:
        letters = same_letter(text)
        unknown = sorted(set(letters) - set(self._symbols))
        if unknown:
            raise RewardError(
                f"metadata.text {text!r} has {unknown}, which the OCR network cannot read. "
                "Remove the prompt, or score it with another scorer."
            )
        return [self._symbols[letter] for letter in letters]


def recognizer_pixels(images: Tensor) -> Tensor:
    """[B, 3, 48, 64] in [-1, 1], BGR: `ocr_model.recognizer_input` without rounding to bytes.

    images: [B, 3, H, W] RGB in [0, 1].
    """
    # Pillow's BILINEAR averages over more pixels when it shrinks, which torch calls antialias.
    size = (INPUT_HEIGHT, INPUT_WIDTH)
    resized = F.interpolate(images, size, mode="bilinear", align_corners=False, antialias=True)
    return resized.flip(1) * 2 - 1


def _require_fits(text: str, target: Sequence[int], num_steps: int) -> None:
    """Each character takes one step, and equal neighbours a blank between them."""
    needed = len(target) + sum(a == b for a, b in pairwise(target))
    if not 0 < needed <= num_steps:
        raise RewardError(
            f"metadata.text {text!r} takes {needed} steps of the OCR network, which has 1 to "
            f"{num_steps}. Remove the prompt, or score it with another scorer."
        )
