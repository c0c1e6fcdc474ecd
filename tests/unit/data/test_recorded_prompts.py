"""Images that prompt records name: found from the prompt file's folder, or reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unirl.core.errors import DataError
from unirl.data.prompts import load_prompts
from unirl.data.recorded import images_of, require_recorded, require_unrecorded


def write(folder: Path, *metadata: dict[str, Any]) -> Path:
    path = folder / "pairs.jsonl"
    lines = [json.dumps({"prompt": f"prompt {n}", "metadata": m}) for n, m in enumerate(metadata)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for name in ("a.png", "sub/b.png"):
        (tmp_path / name).touch()
    return tmp_path


def test_paths_are_looked_up_from_the_prompt_files_folder_on(folder, monkeypatch):
    path = write(folder, {"images": ["a.png", "sub/b.png"]}, {"images": [str(folder / "a.png")]})
    monkeypatch.chdir(folder)
    for given in (path, Path(path.name)):
        first, second = load_prompts(given, "data.train")
        assert images_of(first) == (str(folder / "a.png"), str(folder / "sub/b.png"))
        assert images_of(second) == (str(folder / "a.png"),)


def test_the_id_of_a_prompt_stays_when_its_folder_moves(folder, tmp_path_factory):
    (before,) = load_prompts(write(folder, {"images": ["a.png"]}), "data.train")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "a.png").touch()
    (after,) = load_prompts(write(elsewhere, {"images": ["a.png"]}), "data.train")
    assert before.prompt_id == after.prompt_id
    assert images_of(before) != images_of(after)


def test_repeated_records_get_distinct_ids(folder):
    path = folder / "pairs.jsonl"
    path.write_text('{"prompt": "x", "metadata": {"images": ["a.png"]}}\n' * 2)
    first, second = load_prompts(path, "data.train")
    assert second.prompt_id == f"{first.prompt_id}-2"


@pytest.mark.parametrize(
    ("images", "parts"),
    [
        (["a.png", "gone.png"], ["line 2", "gone.png, which is no file"]),
        (["sub"], ["sub, which is no file"]),
        ("a.png", ["line 2", "must be a list of image files"]),
        ([1], ["must be a list of image files, found [1]"]),
        ([""], ["must be a list"]),
    ],
)
def test_images_that_cannot_be_had_are_reported_with_their_line(folder, images, parts):
    path = write(folder, {"images": ["a.png"]}, {"images": images})
    with pytest.raises(DataError) as raised:
        load_prompts(path, "data.train")
    for part in ["data.train", "pairs.jsonl", *parts]:
        assert part in str(raised.value)


def test_recorded_prompts_have_an_image_for_each_sample_and_evaluation_prompts_none(folder):
    path = write(folder, {"images": ["a.png", "sub/b.png"]}, {"images": ["a.png"]}, {})
    pair, single, plain = load_prompts(path, "data.train")
    require_recorded([pair], 2, "data.train")
    for wrong, count in ((single, 1), (plain, 0)):
        with pytest.raises(DataError, match=f"names {count} images.*samples_per_prompt=2"):
            require_recorded([pair, wrong], 2, "data.train")
    require_unrecorded([plain], "data.eval")
    with pytest.raises(DataError, match=r"data\.eval: prompt 'prompt 0' names images"):
        require_unrecorded([plain, pair], "data.eval")
