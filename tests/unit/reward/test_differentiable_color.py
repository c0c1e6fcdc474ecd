"""The colour score and its gradient, and what a differentiable scorer does with bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from unirl.config.resources import resolve_path
from unirl.core.types import PromptRecord
from unirl.reward.color_match import COLOR_TOLERANCE, INK_FRACTION, color_score, color_scores
from unirl.reward.scorer import DifferentiableScorer
from unirl.reward.scorers.color import ColorScorer

RED, WHITE = (215, 25, 30), (250, 250, 250)


class Redness(DifferentiableScorer):
    def __init__(self) -> None:
        self._weight = torch.nn.Parameter(torch.ones(()))

    def score_differentiable(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        return self._weight * images[:, 0].mean(dim=(1, 2))


def random_images(count: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (count, 3, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def test_a_differentiable_scorer_scores_bytes_as_the_same_pixels_without_gradient():
    images = random_images(2, 4, 4)
    scores = Redness().score(images, [red_on_white_record()] * 2)
    torch.testing.assert_close(scores, images[:, 0].float().mean(dim=(1, 2)) / 255)
    assert not scores.requires_grad


def color_score_in_numpy(image: np.ndarray, text_rgb: Sequence[int], paper: Sequence[int]) -> float:
    """The definition, pixel by pixel. image: uint8 [3, H, W]."""
    rows = image.astype(np.float64).transpose(1, 2, 0)
    height, width, _ = rows.shape
    ring = [
        rows[y, x]
        for y, x in product(range(height), range(width))
        if y in (0, height - 1) or x in (0, width - 1)
    ]
    background = np.median(ring, axis=0)
    flat = rows.reshape(-1, 3)
    far = sorted(range(len(flat)), key=lambda i: -np.linalg.norm(flat[i] - background))
    ink = flat[far[: max(1, round(INK_FRACTION * len(flat)))]]

    def close(color: np.ndarray, wanted: Sequence[int]) -> float:
        return max(0.0, 1 - float(np.linalg.norm(color - np.array(wanted))) / COLOR_TOLERANCE)

    return 0.5 * close(background, paper) + 0.5 * float(np.mean([close(c, text_rgb) for c in ink]))


def red_on_white(count: int, height: int = 16, width: int = 32, noise: float = 15) -> Tensor:
    """[B, 3, H, W] uint8: a red block on white, every pixel off by some of its own."""
    generator = torch.Generator().manual_seed(1)
    images = torch.tensor(WHITE)[:, None, None].repeat(count, 1, height, width).float()
    block = images[:, :, height // 4 : height // 2, width // 4 : width // 2]
    block.copy_(torch.tensor(RED)[:, None, None])
    images += noise * torch.randn(images.shape, generator=generator)
    return images.clamp(0, 255).round().to(torch.uint8)


def red_on_white_record() -> PromptRecord:
    return PromptRecord("0", "", {"text_color": "red", "background": "white"})


@pytest.mark.parametrize("images", [red_on_white(8), red_on_white(4, 9, 7), random_images(8, 6, 8)])
def test_the_colour_score_is_its_definition(images: Tensor):
    table = json.loads(Path(resolve_path("pkg:numbers/colors.json")).read_text())
    assert (tuple(table["text"]["red"]), tuple(table["background"]["white"])) == (RED, WHITE)
    scores = ColorScorer().score(images, [red_on_white_record()] * len(images))
    expected = [color_score_in_numpy(image.numpy(), RED, WHITE) for image in images]
    np.testing.assert_allclose(scores.numpy(), expected, atol=1e-5)
    one_by_one = [color_score(image.numpy(), RED, WHITE) for image in images]
    np.testing.assert_allclose(one_by_one, expected, atol=1e-5)


def test_the_gradient_of_the_colour_score_agrees_with_finite_differences():
    generator = torch.Generator().manual_seed(2)
    images = red_on_white(2, 6, 8, noise=4).double()
    images += torch.rand(images.shape, generator=generator, dtype=torch.float64)  # no ties
    images.requires_grad_()
    text, paper = (torch.tensor([color] * 2).double() for color in (RED, WHITE))
    assert (color_scores(images, text, paper) > 0.3).all()
    torch.autograd.gradcheck(lambda x: color_scores(x, text, paper), images, eps=1e-5)


def test_the_gradient_pulls_near_colours_closer_and_leaves_far_ones_alone():
    records = [red_on_white_record()]
    near = (red_on_white(1, noise=4) / 255).requires_grad_()
    (before,) = ColorScorer().score_differentiable(near, records)
    before.backward()
    assert near.grad is not None
    moved = near.detach() + 0.01 * near.grad.sign()
    assert ColorScorer().score_differentiable(moved, records) > before + 0.02
    far = (1 - red_on_white(1) / 255).requires_grad_()
    ColorScorer().score_differentiable(far, records).sum().backward()
    assert far.grad is not None
    assert not far.grad.any()


def test_a_perfect_colour_has_a_finite_gradient():
    images = (red_on_white(1, noise=0) / 255).requires_grad_()
    (score,) = ColorScorer().score_differentiable(images, [red_on_white_record()])
    score.backward()
    assert score.item() == pytest.approx(1, abs=1e-5)
    assert images.grad is not None
    assert images.grad.isfinite().all()
