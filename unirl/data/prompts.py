"""Reads prompt files: a path goes in, a tuple of `PromptRecord` comes out, or a `DataError`.

    .txt    one prompt a line, blank lines skipped
    .jsonl  one record a line: {"prompt": ..., "images": [...], "prompt_id": ..., "metadata": {...}}
    .json   a list of such records

`caption` is another name of `prompt`; all else is optional. `images` are files that the model is
given beside the text, `metadata.images` are recorded samples of the prompt; both are paths from the
prompt file's folder on. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unirl.core.errors import DataError
from unirl.core.types import PromptRecord

PROMPT_FILES = (".txt", ".jsonl", ".json")
_FIELDS = ("prompt", "caption", "images", "prompt_id", "metadata")


def load_prompts(path: Path, key: str) -> tuple[PromptRecord, ...]:
    """All prompts of a file, in file order, with distinct ids.

    A record without `prompt_id` gets one derived from its content, so it stays the same when other
    lines are added or moved; the n-th repetition of equal content ends in `-n`.

    Args:
        key: the config key that named the file, for messages.

    Raises:
        DataError: the file or a record is unusable; names the file, the line and the key.
    """
    source = f"{key}={path}"
    text = _read_text(path, source)
    readers = {".txt": _txt_records, ".jsonl": _jsonl_records, ".json": _json_records}
    if path.suffix.lower() not in readers:
        raise DataError(
            f"{source}: a prompt file ends in .txt, .jsonl or .json, this one in "
            f"'{path.suffix}'. Rename it or set {key} to another file."
        )
    located = list(readers[path.suffix.lower()](text, source))
    if not located:
        raise DataError(f"{source}: the file holds no prompt. Add prompts or set {key}.")
    records = _with_distinct_ids(located)
    return tuple(
        _with_found_images(record, where, path.parent)
        for (where, _), record in zip(located, records, strict=True)
    )


def _read_text(path: Path, source: str) -> str:
    try:
        data = path.read_bytes()
    except IsADirectoryError:
        raise DataError(
            f"{source}: expected a prompt file, found a folder. Name a file in it."
        ) from None
    except FileNotFoundError:
        raise DataError(
            f"{source}: no such file (looked at {path.absolute()}). Correct the path."
        ) from None
    except OSError as error:
        raise DataError(f"{source}: cannot be read: {error.strerror}.") from error
    problem_at = data.find(b"\0")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem_at = error.start if problem_at < 0 else min(problem_at, error.start)
        text = ""
    if problem_at >= 0:
        line = data.count(b"\n", 0, problem_at) + 1
        raise DataError(
            f"{source}, line {line}: not UTF-8 text (byte 0x{data[problem_at]:02x} at offset "
            f"{problem_at}); is this a binary file? Save the prompts as UTF-8."
        )
    return text


# Each reader yields (where, record) with `where` such as "data.train=p.jsonl, line 3".


def _txt_records(text: str, source: str) -> Iterator[tuple[str, PromptRecord]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{source}, line {number}"
            yield where, _record({"prompt": line.strip()}, where)


def _jsonl_records(text: str, source: str) -> Iterator[tuple[str, PromptRecord]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{source}, line {number}"
            yield where, _record(_parse_json(line, where), where)


def _json_records(text: str, source: str) -> Iterator[tuple[str, PromptRecord]]:
    if not text.strip():
        return
    records = _parse_json(text, source)
    if not isinstance(records, list):
        raise DataError(
            f"{source}: expected a list of records, found {_type_name(records)}. "
            "One record per line belongs in a .jsonl file."
        )
    for number, fields in enumerate(records, start=1):
        where = f"{source}, record {number}"
        yield where, _record(fields, where)


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f", line {error.lineno}" if "\n" in text.strip() else ""
        raise DataError(
            f"{where}{place}, column {error.colno}: not valid JSON: {error.msg}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: JSON that cannot be read: {error}.") from error


def _record(fields: Any, where: str) -> PromptRecord:
    if not isinstance(fields, dict):
        raise DataError(f'{where}: expected {{"prompt": ...}}, found {_type_name(fields)}.')
    unknown = [name for name in fields if name not in _FIELDS]
    if unknown:
        raise DataError(
            f"{where}: unknown field '{unknown[0]}'; a record has {', '.join(_FIELDS)}. "
            'What a scorer needs to know goes into "metadata".'
        )
    present = [name for name in ("prompt", "caption") if name in fields]
    if len(present) != 1:
        raise DataError(
            f"{where}: expected one of 'prompt' and 'caption', found "
            f"{'both' if present else 'neither'}."
        )
    text = fields[present[0]]
    if not isinstance(text, str):
        raise DataError(f"{where}: '{present[0]}' must be text, found {_type_name(text)}.")
    if not text.strip():
        raise DataError(f"{where}: '{present[0]}' is blank. Write the prompt or remove the record.")
    metadata = fields.get("metadata", {})
    if not isinstance(metadata, dict):
        raise DataError(f"{where}: 'metadata' must be an object, found {_type_name(metadata)}.")
    images = tuple(_file_names(fields["images"], "images", where)) if "images" in fields else ()
    if "prompt_id" not in fields:
        return PromptRecord(_content_id(text, metadata, images), text, metadata, images)
    prompt_id = fields["prompt_id"]
    if not isinstance(prompt_id, str) or not prompt_id.strip():
        raise DataError(
            f"{where}: 'prompt_id' must be non-blank text, found {_type_name(prompt_id)} "
            f"{json.dumps(prompt_id)}."
        )
    return PromptRecord(prompt_id, text, metadata, images)


def _content_id(text: str, metadata: Mapping[str, Any], images: tuple[str, ...]) -> str:
    content = json.dumps([text, metadata, *([images] if images else [])], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _with_distinct_ids(located: list[tuple[str, PromptRecord]]) -> tuple[PromptRecord, ...]:
    """Numbers repeated content; refuses a repeated explicit id."""
    first_seen: dict[str, str] = {}
    repetitions: dict[str, int] = {}
    records = []
    for where, record in located:
        prompt_id = record.prompt_id
        if prompt_id == _content_id(record.text, record.metadata, record.images):
            repetitions[prompt_id] = repetitions.get(prompt_id, 0) + 1
            if repetitions[prompt_id] > 1:
                prompt_id = f"{prompt_id}-{repetitions[prompt_id]}"
        if prompt_id in first_seen:
            raise DataError(
                f"{where}: prompt_id '{prompt_id}' was used before, by {first_seen[prompt_id]}. "
                "Give each record its own prompt_id or leave it out."
            )
        first_seen[prompt_id] = where
        records.append(replace(record, prompt_id=prompt_id))
    return tuple(records)


def _with_found_images(record: PromptRecord, where: str, folder: Path) -> PromptRecord:
    """The same prompt with absolute paths; its id goes by the paths as they were written."""
    found = replace(record, images=tuple(_paths(record.images, "images", where, folder)))
    if "images" not in record.metadata:
        return found
    names = _file_names(record.metadata["images"], "metadata.images", where)
    recorded = _paths(names, "metadata.images", where, folder)
    return replace(found, metadata={**record.metadata, "images": recorded})


def _file_names(named: Any, field: str, where: str) -> list[str]:
    if not isinstance(named, list) or not all(isinstance(name, str) and name for name in named):
        raise DataError(
            f"{where}: '{field}' must be a list of image files, found {json.dumps(named)}."
        )
    return named


def _paths(names: Sequence[str], field: str, where: str, folder: Path) -> list[str]:
    paths = [(folder / name).absolute() for name in names]
    for path in paths:
        if not path.is_file():
            raise DataError(
                f"{where}: {field} names {path}, which is no file. Paths are looked up "
                f"from the prompt file's folder on."
            )
    return [str(path) for path in paths]


def _type_name(value: Any) -> str:
    """The JSON name of a value's type."""
    names = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true/false",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names[type(value)]
