"""Weights of a teacher: an adapter that was trained before, from a checkpoint or a file."""

from __future__ import annotations

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from unirl.config.resources import weights_file
from unirl.core.errors import ModelError


def read_teacher(path: str) -> dict[str, Tensor]:
    """The trained weights by parameter name; ModelError with the key when they cannot be read.

    `path`: a safetensors file, or a checkpoint folder.
    """
    file = weights_file(path)
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"algorithm.teachers: {file} cannot be read as weights of an adapter: {error}"
        ) from error
