"""The scorers that come with the package, on images whose score is known."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import host_arena, offload, onload
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from unirl.config.schema import RewardConfig
from unirl.core.errors import ResidencyError
from unirl.core.types import PromptRecord
from unirl.reward.scorers.color import ColorScorer
from unirl.reward.scorers.jpeg import JpegSizeScorer
from unirl.reward.scorers.ocr import ExactReadScorer, OcrScorer
from unirl.reward.service import RewardService, WeightedScorer

Color = str | tuple[int, int, int]


def picture(text: str, ink: Color = "black", paper: Color = "white") -> Tensor:
    """[3, 32, 64] uint8 rendering of a short text."""
    image = Image.new("RGB", (64, 32), paper)
    font = ImageFont.load_default(size=26)
    ImageDraw.Draw(image).text((32, 16), text, fill=ink, font=font, anchor="mm")
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).contiguous()


def wanted(text: str) -> PromptRecord:
    return PromptRecord(text, f'the number "{text}"', {"text": text})


@pytest.fixture(scope="module")
def ocr() -> OcrScorer:
    return OcrScorer()


# --- OCR ------------------------------------------------------------------------------------------


def test_ocr_gives_one_for_the_right_text_and_less_for_each_wrong_character(ocr):
    image = picture("374")
    targets = ["374", "371", "911", "3742"]
    scores = ocr.score(torch.stack([image] * 4), [wanted(text) for text in targets])
    assert scores == pytest.approx([1, 2 / 3, 0, 3 / 4])


def test_ocr_ignores_case(ocr):
    assert ocr.score(picture("AB")[None], [wanted("ab")]) == [1]


def test_ocr_of_an_image_does_not_depend_on_its_batch(ocr):
    images = torch.stack([picture(text) for text in ("12", "345", "678", "90")] * 5)
    records = [wanted("345")] * 20
    alone = [ocr.score(image[None], [wanted("345")])[0] for image in images]
    assert ocr.score(images, records) == alone


def test_a_blank_image_reads_as_nothing(ocr):
    assert ocr.score(torch.full((1, 3, 32, 64), 255, dtype=torch.uint8), [wanted("7")]) == [0]


def test_exact_read_is_all_or_nothing():
    images = torch.stack([picture("374")] * 2)
    assert ExactReadScorer().score(images, [wanted("374"), wanted("371")]) == [1, 0]


def test_the_ocr_session_is_really_gone_while_parked_and_reads_the_same_afterwards():
    scorer = OcrScorer()
    session = weakref.ref(scorer._network._recognizer)  # type: ignore[arg-type]
    rewards = RewardService({"ocr": WeightedScorer(scorer, 1.0)}, {}, RewardConfig(), host_arena())
    moved = offload(rewards)
    gc.collect()
    assert session() is None
    assert moved.dropped_bytes > 1e6
    with pytest.raises(ResidencyError, match="while parked"):
        scorer.score(picture("374")[None], [wanted("374")])
    onload(rewards)
    assert scorer.score(picture("374")[None], [wanted("374")]) == [1]
    (part,) = rewards.parts
    assert part.name == "reward.ocr.network"


def test_ocr_names_the_metadata_it_needs(ocr):
    assert tuple(ocr.required_metadata()) == ("text",)


# --- colour ---------------------------------------------------------------------------------------


RED, BLUE, WHITE, NAVY = (200, 30, 30), (40, 60, 200), (250, 250, 250), (10, 10, 60)


@pytest.fixture
def color_scorer(tmp_path: Path) -> ColorScorer:
    path = tmp_path / "colors.json"
    path.write_text(json.dumps({"text": {"red": RED}, "background": {"white": WHITE}}))
    return ColorScorer(str(path))


def test_colour_counts_half_for_the_text_and_half_for_the_background(color_scorer):
    def score(ink: tuple[int, int, int], paper: tuple[int, int, int]) -> float:
        record = PromptRecord("0", "", {"text_color": "red", "background": "white"})
        return color_scorer.score(picture("374", ink, paper)[None], [record])[0]

    assert score(RED, WHITE) == pytest.approx(1, abs=0.02)
    assert score(BLUE, WHITE) == 0.5
    assert score(RED, NAVY) == pytest.approx(0.5, abs=0.02)
    assert score(BLUE, NAVY) == score(WHITE, RED) == 0
    assert 0.6 < score((205, 40, 35), WHITE) < 0.95


def test_a_colour_that_is_not_known_is_named(color_scorer):
    record = PromptRecord("0", "a sign", {"text_color": "mauve", "background": "white"})
    with pytest.raises(
        ValueError, match=r"'a sign' has metadata.text_color='mauve'; known are red"
    ):
        color_scorer.score(picture("374", RED, WHITE)[None], [record])


def test_colour_names_the_metadata_it_needs():
    assert set(ColorScorer().required_metadata()) == {"text_color", "background"}


# --- JPEG -----------------------------------------------------------------------------------------


def test_jpeg_prefers_flat_images_or_busy_ones():
    flat = torch.full((3, 64, 64), 128, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    busy = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8, generator=generator)
    images, records = torch.stack([flat, busy]), [wanted("1")] * 2
    small, large = (
        JpegSizeScorer().score(images, records),
        JpegSizeScorer("large").score(images, records),
    )
    assert small[0] > small[1]
    assert small == [-value for value in large]
    assert all(value > 0.5 for value in large)


def test_an_unknown_preference_is_refused():
    with pytest.raises(ValueError, match="'small' or 'large'"):
        JpegSizeScorer("tiny")  # type: ignore[arg-type]
