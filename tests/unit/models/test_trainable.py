"""What a recipe asks of its model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families.sd3 import build_tiny_sd3

from unirl.cli.compose import compose
from unirl.models.base import Frozen, LoadSettings
from unirl.models.trainable import load_settings


@pytest.mark.parametrize("with_encoders", [True, False])
def test_the_settings_are_those_of_the_recipe(with_encoders: bool, tmp_path: Path) -> None:
    folder = build_tiny_sd3(tmp_path / "sd3")
    keys = ("precision=bf16", "frozen_dtype=fp32", "max_sequence_length=7", f"path={folder}")
    config = compose("diffusion/sd3/sd3_trainside", [f"model.{key}" for key in keys])
    assert load_settings(config, with_encoders) == LoadSettings(
        frozen_dtype=torch.float32,
        compute_dtype=torch.bfloat16,
        max_sequence_length=7,
        frozen=Frozen.ALL if with_encoders else Frozen.NONE,
    )
