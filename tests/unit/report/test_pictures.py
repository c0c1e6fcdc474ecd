"""Before and after: every prompt, honest marks, a bound on bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from report_runs import PROMPTS, write_run, write_samples

from unirl.report.pictures import Pictures, embed, pictures
from unirl.report.reading import read_run
from unirl.report.shown import families
from unirl.tracking.evaluations import note_changes


def test_all_prompts_come_in_order_with_the_extremes_marked(tmp_path: Path) -> None:
    found = pictures(families([read_run(write_run(tmp_path / "run"))])[0].runs)
    assert isinstance(found, Pictures)
    assert [prompt.text for prompt in found.prompts] == list(PROMPTS)
    marks = [pair.mark for prompt in found.prompts if (pair := prompt.pairs[0])]
    assert marks == ["", "", "", "largest gain"]  # nothing lost


def test_a_prompt_that_lost_is_marked_too(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", gain=-0.03))
    found = pictures(families([run])[0].runs)
    assert isinstance(found, Pictures)
    assert next(p.pairs[0].mark for p in found.prompts if p.pairs[0]) == "largest loss"


def test_before_and_after_are_evaluations_that_can_be_compared(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", num_rollouts=14)
    write_samples(path, 12, PROMPTS, 0.6, 16)
    note_changes(path, 12, ["eval_num_prompts: 8 -> 4"])
    found = pictures(families([read_run(path)])[0].runs)
    assert isinstance(found, Pictures)
    assert found.steps == ("before: 12 rollouts; after: 14 rollouts",)
    note_changes(path, 14, ["seed: 0 -> 3"])
    one = pictures(families([read_run(path)])[0].runs)
    assert one == "There is one evaluation of its kind so far; before and after need two."


def test_small_images_are_kept_bit_for_bit(tmp_path: Path) -> None:
    array = np.arange(16 * 32 * 3, dtype=np.uint8).reshape(16, 32, 3)
    Image.fromarray(array).save(tmp_path / "small.png")
    embedded, _ = embed([tmp_path / "small.png"], 10**6)
    picture = embedded[tmp_path / "small.png"]
    assert picture.is_small
    assert (picture.width, picture.height) == (32, 16)
    assert picture.uri.startswith("data:image/png;base64,")


def test_large_images_shrink_until_all_are_within_the_bound(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    paths = [tmp_path / f"{number}.png" for number in range(4)]
    for path in paths:
        Image.fromarray(noise.integers(0, 255, (300, 600, 3), dtype=np.uint8)).save(path)
    embedded, side = embed(paths, 60_000)
    assert len(embedded) == 4
    assert side < 512
    assert max(picture.width for picture in embedded.values()) <= side
    assert sum(len(picture.uri) for picture in embedded.values()) < 60_000 * 1.4


def test_what_does_not_fit_even_small_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "noise.png"
    noise = np.random.default_rng(0).integers(0, 255, (300, 300, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    embedded, _ = embed([path], 100)
    assert embedded == {}
