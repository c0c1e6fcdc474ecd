"""Prompt files are read as written, or refused with the file, the line and the key."""

import json
import subprocess
import sys

import pytest

from unirl.core.errors import DataError
from unirl.data.prompts import load_prompts


@pytest.fixture
def load(tmp_path):
    def load(name: str, content: bytes | str):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return load_prompts(path, "data.train")

    return load


def test_a_text_file_is_a_prompt_per_line(load):
    records = load("p.txt", "\ufeffa red cat\r\n\n  ein grüner Hund \n\n")
    assert [record.text for record in records] == ["a red cat", "ein grüner Hund"]
    assert all(record.metadata == {} for record in records)


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_records_keep_their_fields(load, form):
    fields = [
        {"prompt": 'the number "7"\u2028in red', "metadata": {"text": "7"}},
        {"caption": "a cat", "prompt_id": "cat"},
    ]
    lines = "\n\n".join(json.dumps(f, ensure_ascii=False) for f in fields)
    records = load(f"p.{form}", lines if form == "jsonl" else json.dumps(fields, indent=1))
    assert [r.text for r in records] == ['the number "7"\u2028in red', "a cat"]
    assert records[0].metadata == {"text": "7"}
    assert records[1].prompt_id == "cat"


def test_default_ids_depend_on_content_alone(load):
    first, second = load("a.txt", "one\ntwo\n")
    assert first.prompt_id != second.prompt_id
    assert [r.prompt_id for r in load("b.txt", "zero\n\ntwo\none\n")][1:] == [
        second.prompt_id,
        first.prompt_id,
    ]
    (with_metadata,) = load("c.jsonl", '{"prompt": "one", "metadata": {"text": "1"}}')
    assert with_metadata.prompt_id != first.prompt_id
    assert load("d.json", '[{"caption": "one"}]')[0].prompt_id == first.prompt_id


def test_repeated_content_gets_distinct_ids(load):
    ids = [record.prompt_id for record in load("p.txt", "one\none\none\n")]
    assert ids == [ids[0], f"{ids[0]}-2", f"{ids[0]}-3"]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("p.txt", "", ["holds no prompt"]),
        ("p.txt", " \n\n", ["holds no prompt"]),
        ("p.jsonl", "\n", ["holds no prompt"]),
        ("p.json", "", ["holds no prompt"]),
        ("p.json", "[]", ["holds no prompt"]),
        ("p.csv", "prompt\ncat", ["'.csv'", ".jsonl"]),
        ("p.txt", b"fine\n\x89PNG\r\n\x1a\n\x00\x00", ["line 2", "UTF-8", "0x89", "offset 5"]),
        ("p.jsonl", b"a\n\nb\x00c", ["line 3", "UTF-8"]),
        ("p.txt", "caf\u00e9".encode("latin-1"), ["line 1", "0xe9"]),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": ', ["line 2", "not valid JSON"]),
        ("p.json", '[{"prompt": "a"},\n {"prompt" "b"}]', ["line 2", "not valid JSON"]),
        ("p.json", "[" * 100_000, ["cannot be read"]),
        ("p.json", '{"prompt": "a"}', ["a list of records, found an object"]),
        ("p.jsonl", '"just text"', ["line 1", "found text"]),
        ("p.json", '[{"prompt": "a"}, 3]', ["record 2", "found a number"]),
        ("p.jsonl", '{"metadata": {}}', ["line 1", "found neither"]),
        ("p.jsonl", '{"prompt": "a", "caption": "b"}', ["line 1", "found both"]),
        ("p.jsonl", '\n{"prompt": "  "}', ["line 2", "'prompt' is blank"]),
        ("p.jsonl", '{"caption": null}', ["'caption' must be text, found null"]),
        ("p.jsonl", '{"prompt": ["a"]}', ["'prompt' must be text, found a list"]),
        ("p.jsonl", '{"prompt": "a", "metadata": "x"}', ["'metadata' must be an object"]),
        ("p.jsonl", '{"prompt": "a", "prompt_id": 3}', ["'prompt_id'", "found a number 3"]),
        ("p.jsonl", '{"prompt": "a", "metdata": {}}', ["unknown field 'metdata'", "metadata"]),
        (
            "p.jsonl",
            '{"prompt": "a", "prompt_id": "x"}\n{"prompt": "b"}\n{"prompt": "c", "prompt_id": "x"}',
            ["line 3", "prompt_id 'x' was used before", "line 1"],
        ),
    ],
)
def test_a_bad_file_is_refused_with_its_place(load, name, content, parts):
    with pytest.raises(DataError) as raised:
        load(name, content)
    for part in [name, "data.train", *parts]:
        assert part in str(raised.value)


def test_a_path_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"data\.eval=.*nowhere\.txt: no such file"):
        load_prompts(tmp_path / "nowhere.txt", "data.eval")
    with pytest.raises(DataError, match=r"data\.eval=.*found a folder"):
        load_prompts(tmp_path, "data.eval")
    with pytest.raises(DataError, match=r"data\.eval=.*cannot be read: File name too long"):
        load_prompts(tmp_path / ("x" * 300), "data.eval")


def test_reading_prompts_does_not_import_torch():
    code = "import sys, unirl.data.prompts, unirl.data.stream; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_images_of_a_prompt_are_found_from_its_file_on(load, tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("cat.png", "dog.png"):
        (tmp_path / "in" / name).write_bytes(b"")
    lines = [
        {"prompt": "make it red", "images": ["in/cat.png"], "metadata": {"text": "7"}},
        {"prompt": "make it red", "images": ["in/dog.png", "in/cat.png"]},
        {"prompt": "make it red"},
    ]
    one, two, three = load("p.jsonl", "\n".join(json.dumps(line) for line in lines))
    assert one.images == (str(tmp_path / "in" / "cat.png"),)
    assert [path.rsplit("/", 1)[1] for path in two.images] == ["dog.png", "cat.png"]
    assert three.images == ()
    assert one.metadata == {"text": "7"}
    assert len({record.prompt_id for record in (one, two, three)}) == 3


@pytest.mark.parametrize("images", ["cat.png", ["lost.png"], [7], [""]])
def test_images_that_are_no_files_are_refused_with_their_line(load, images):
    lines = '{"prompt": "a cat"}\n' + json.dumps({"prompt": "it", "images": images})
    with pytest.raises(DataError, match=r"data\.train=.*line 2: .*images"):
        load("p.jsonl", lines)
