"""What a model's configuration files say, where they can be read without torch."""

from __future__ import annotations

import json
from pathlib import Path

from unirl.config.resources import RELEASES, resolve_path
from unirl.config.schema import ModelConfig


def value_in_files(model: ModelConfig, file: str, key: str) -> object:
    """`key` in `file` of the model's folder or, while there is none, of the release it will be.

    None where that says nothing, or cannot be read, which is told when the model loads.
    """
    folder = resolve_path(model.path)
    if not (model.path and folder.is_dir()):
        folder = RELEASES / (model.release or "")
    return _read(folder / file).get(key)


def _read(file: Path) -> dict[str, object]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return {}
