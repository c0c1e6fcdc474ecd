"""The archive of evaluations: lossless images, picture sheets, the same files every time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from builders import run_config
from PIL import Image
from torch import Tensor

from unirl.core.errors import UnirlError
from unirl.tracking.evaluations import EvaluatedSample, evaluation_file, read_evaluation
from unirl.tracking.metrics import describe_panel
from unirl.trainer.archive import EvaluatedSuite, EvaluationArchive

TEXTS = ("a red cat", "a blue dog", "a green house")


def suite(name: str = "eval", width: int = 8, seed: int = 0) -> EvaluatedSuite:
    samples = tuple(
        EvaluatedSample(prompt, text, sample, 0.5, {}, {})
        for prompt, text in enumerate(TEXTS)
        for sample in range(2)
    )
    generator = torch.Generator().manual_seed(seed)
    shown = torch.randint(0, 256, (3, 3, 8, width), dtype=torch.uint8, generator=generator)
    return EvaluatedSuite(name, samples, shown)


def archive(run_dir: Path, num_images: int = 3) -> EvaluationArchive:
    return EvaluationArchive(run_dir, run_config({"logging.media_max_items": num_images}))


def pixels(path: Path) -> Tensor:
    with Image.open(path) as image:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_images_come_back_bit_by_bit_and_the_lines_say_where_they_are(tmp_path):
    evaluated = suite()
    archive(tmp_path, num_images=2).save(7, [evaluated])
    samples = read_evaluation(evaluation_file(tmp_path, "eval", 7))
    named = {s.prompt: s.image for s in samples if s.image is not None}
    assert named == {0: "images/eval-000007/0000.png", 1: "images/eval-000007/0001.png"}
    assert all(s.image is None for s in samples if s.sample > 0)
    for prompt, name in named.items():
        assert torch.equal(pixels(tmp_path / name), evaluated.shown[prompt])


@pytest.mark.parametrize("width", [8, 24])  # an image, the film strip of a video
def test_the_first_evaluation_gives_a_grid_and_later_ones_a_comparison_too(tmp_path, width):
    kept = archive(tmp_path)
    first, second = (kept.save(step, [suite(width=width, seed=step)]) for step in (0, 2))
    assert [panel.name for panel in first] == ["eval/samples", "eval/grid"]
    *_, grid, pairs = (panel.pictures[0].path for panel in second)
    assert [grid.name, pairs.name] == ["eval-000002.png", "before_after.png"]
    assert pixels(pairs).shape[2] > pixels(grid).shape[2] / 2


def test_panels_show_the_same_prompts_each_time_with_their_rewards(tmp_path):
    kept = archive(tmp_path, num_images=2)
    for step in (0, 2):
        samples, *_ = kept.save(step, [suite("heldout")])
        assert (samples.name, samples.rollouts_done) == ("eval/heldout/samples", step)
        assert [picture.caption for picture in samples.pictures] == [
            "0.500 a red cat",
            "0.500 a blue dog",
        ]
        assert all(picture.path.is_file() for picture in samples.pictures)
        assert describe_panel(samples.name)


def test_an_evaluation_made_again_gives_the_same_files(tmp_path):
    for step in (0, 2):
        archive(tmp_path).save(step, [suite(seed=step), suite("other")])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    for step in (0, 2):
        archive(tmp_path).save(step, [suite(seed=step), suite("other")])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert len(files) == 4 + 4 * 3 + 3


def test_a_resumed_run_that_shows_fewer_images_compares_those(tmp_path):
    archive(tmp_path).save(0, [suite()])
    assert len(archive(tmp_path, num_images=2).save(2, [suite()])) == 3
    assert len(archive(tmp_path, num_images=3).save(4, [suite()])) == 3


def test_a_disk_that_refuses_ends_the_run_naming_the_file(tmp_path):
    (tmp_path / "evaluations").write_text("in the way")
    with pytest.raises(UnirlError, match=r"eval-000000\.jsonl cannot be written"):
        archive(tmp_path).save(0, [suite()])
