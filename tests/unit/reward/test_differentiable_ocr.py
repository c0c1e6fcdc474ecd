"""The recogniser in torch: the same reading, the probability of a text, and a true gradient."""

from __future__ import annotations

import math
from itertools import groupby, product

import numpy as np
import onnxruntime
import pytest
import torch
from builders import host_arena, offload, onload
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

pytest.importorskip("onnx")

from unirl.config.schema import RewardConfig
from unirl.core.errors import ResidencyError, RewardError
from unirl.core.types import PromptRecord
from unirl.reward.ocr_model import bundled_model_path, make_alphabet, recognizer_input
from unirl.reward.scorers.differentiable_ocr import OcrCtcScorer
from unirl.reward.scorers.ocr import OcrScorer
from unirl.reward.service import RewardService, WeightedScorer
from unirl.reward.torch_ocr import TextRecognizer, recognizer_pixels


def text_image(text: str, height: int = 32, width: int = 64) -> Tensor:
    """[3, H, W] uint8, black on white."""
    image = Image.new("RGB", (width, height), "white")
    font = ImageFont.load_default(size=height * 0.8)
    ImageDraw.Draw(image).text((width / 2, height / 2), text, "black", font=font, anchor="mm")
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).contiguous()


def asks_for(text: str) -> PromptRecord:
    return PromptRecord(text, f'the number "{text}"', {"text": text})


def random_images(count: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (count, 3, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def ctc() -> OcrCtcScorer:
    return OcrCtcScorer()


@pytest.fixture(scope="module")
def recognizer() -> TextRecognizer:
    return TextRecognizer(bundled_model_path())


# --- probability of a text ------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width"), [(16, 32), (48, 64), (50, 70), (128, 256)])
def test_the_network_sees_the_pixels_that_the_ocr_reward_sees(height: int, width: int):
    images = random_images(2, height, width)
    expected = recognizer_input(images.numpy())
    got = recognizer_pixels(images / 255).numpy()
    # Pillow rounds to bytes after each of its two passes.
    np.testing.assert_allclose(got, expected, atol=1.01 / 127.5)


def summed_over_alignments(image: Tensor, text: str) -> float:
    """p(text | image) by enumeration of all paths, with probabilities from onnxruntime."""
    session = onnxruntime.InferenceSession(
        str(bundled_model_path()), providers=["CPUExecutionProvider"]
    )
    pixels = recognizer_pixels(image[None] / 255).numpy()
    probs = np.asarray(session.run(None, {"x": pixels})[0])[0]
    alphabet = make_alphabet(session.get_modelmeta().custom_metadata_map["character"])
    by_symbol: dict[str, np.ndarray] = {}
    for symbol in ("", *sorted(set(text))):
        spellings = (symbol, *SPELLINGS.get(symbol, ""))
        columns = [i for i, character in enumerate(alphabet) if character in spellings]
        by_symbol[symbol] = probs[:, columns].sum(axis=1)
    total = 0.0
    for path in product(by_symbol, repeat=len(probs)):
        if "".join(symbol for symbol, _ in groupby(path)) == text:
            total += math.prod(by_symbol[symbol][t] for t, symbol in enumerate(path))
    return total


SPELLINGS = {"1": "①１", "2": "②２²", "3": "③３", "7": "７", "A": "aＡａ"}
"""What the network tells apart and the reward does not."""


@pytest.mark.parametrize(
    ("shown", "asked"), [("12", "12"), ("12", "1"), ("11", "11"), ("3", "7"), ("a", "A")]
)
def test_the_probability_of_a_text_is_summed_over_all_its_alignments(recognizer, shown, asked):
    image = text_image(shown)
    got = recognizer.log_prob_per_character(image[None] / 255, [asked])
    expected = math.log(summed_over_alignments(image, asked)) / len(asked)
    assert got.item() == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_upper_and_lower_case_are_one(ctc):
    images = torch.stack([text_image("AB"), text_image("ab")])
    upper = ctc.score(images, [asks_for("AB")] * 2)
    torch.testing.assert_close(upper, ctc.score(images, [asks_for("ab")] * 2))
    assert upper.min() > 0.95


def test_the_score_is_one_for_the_right_text_and_falls_with_each_wrong_character(ctc):
    images = torch.stack([text_image("374")] * 4)
    right, one_wrong, two_wrong, all_wrong = ctc.score(
        images, [asks_for(text) for text in ("374", "371", "391", "591")]
    ).tolist()
    assert 0.98 < right <= 1
    assert right > one_wrong + 0.2 > two_wrong + 0.4 > all_wrong + 0.5


def test_an_image_without_text_scores_about_zero(ctc):
    flat = torch.full((1, 3, 16, 32), 128, dtype=torch.uint8)
    assert abs(ctc.score(flat, [asks_for("374")]).item()) < 0.25


def test_the_score_of_an_image_does_not_depend_on_its_batch(ctc):
    texts = ("12", "345", "67", "9") * 5
    images = torch.stack([text_image(text, 16, 32) for text in texts])
    records = [asks_for(text) for text in texts]
    alone = torch.cat([ctc.score(images[i : i + 1], records[i : i + 1]) for i in range(20)])
    torch.testing.assert_close(ctc.score(images, records), alone, atol=1e-5, rtol=1e-5)


def test_the_callers_autocast_does_not_reach_the_network(ctc):
    images, records = text_image("35")[None] / 255, [asks_for("38")]
    expected = ctc.score_differentiable(images, records)
    with torch.autocast("cpu", torch.bfloat16):
        scores = ctc.score_differentiable(images, records)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [("33333", "takes 9 steps.* 1 to 8"), ("", "takes 0 steps"), ("4\u0e01", "cannot read")],
)
def test_a_text_that_the_network_cannot_spell_is_an_error(ctc, text: str, message: str):
    with pytest.raises(RewardError, match=message):
        ctc.score(text_image("3")[None], [asks_for(text)])


def test_parked_weights_are_gone_and_the_score_is_the_same_afterwards():
    scorer = OcrCtcScorer()
    service = RewardService({"ctc": WeightedScorer(scorer, 1.0)}, {}, RewardConfig(), host_arena())
    images, records = text_image("374")[None], [asks_for("371")]
    before = scorer.score(images, records)
    assert offload(service).touched_bytes > 1e7
    assert all(w.untyped_storage().nbytes() == 0 for w in scorer._recognizer.parameters())
    with pytest.raises(ResidencyError):
        service.differentiable(images / 255, records)
    onload(service)
    assert torch.equal(scorer.score(images, records), before)
    names = {part.name for part in service.parts}
    assert names == {"reward.ctc.network.weights", "reward.ctc.network.buffers"}


# --- its gradient ---------------------------------------------------------------------------------


def test_the_gradient_of_the_ocr_score_agrees_with_finite_differences(ctc):
    images = (0.2 + 0.6 * text_image("35", 16, 32)[None] / 255).requires_grad_()
    records = [asks_for("38")]
    ctc.score_differentiable(images, records).sum().backward()
    assert images.grad is not None
    gradient, step = images.grad.flatten(), 2e-3
    for pixel in gradient.abs().topk(5).indices.tolist():
        moved = images.detach().repeat(2, 1, 1, 1)
        moved[0].view(-1)[pixel] += step
        moved[1].view(-1)[pixel] -= step
        with torch.no_grad():
            high, low = ctc.score_differentiable(moved, records * 2)
        assert ((high - low) / (2 * step)).item() == pytest.approx(gradient[pixel].item(), rel=0.05)


def test_climbing_the_gradient_writes_the_text_into_a_grey_image(ctc):
    generator = torch.Generator().manual_seed(0)
    pixels = 0.5 + 0.02 * torch.randn((2, 3, 32, 64), generator=generator)
    pixels.requires_grad_()
    records = [asks_for("374"), asks_for("12")]
    optimizer = torch.optim.Adam([pixels], lr=0.02)
    scores = []
    for _ in range(25):
        score = ctc.score_differentiable(pixels.clamp(0, 1), records)
        scores.append(score.detach())
        optimizer.zero_grad()
        (-score.sum()).backward()
        optimizer.step()
    assert (scores[0] < 0.6).all()
    assert (scores[-1] > 0.9).all()
    read = (pixels.detach().clamp(0, 1) * 255).round().to(torch.uint8)
    assert OcrScorer().score(read, records) == [1, 1]


def test_the_networks_weights_get_no_gradient(ctc):
    images = (text_image("12")[None] / 255).requires_grad_()
    ctc.score_differentiable(images, [asks_for("12")]).sum().backward()
    assert all(p.grad is None for p in ctc._recognizer.parameters())
