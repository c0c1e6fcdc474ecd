"""What a model does not make is refused by its configuration files alone, before weights load."""

from __future__ import annotations

from typing import Any

import pytest

from unirl.config.resources import RELEASES
from unirl.config.schema import RunConfig
from unirl.core.errors import ModelError
from unirl.runtime.training_model import require_makeable


def config(family: str, release: str, **blocks: Any) -> RunConfig:
    """The folder has configuration files and no weights."""
    sampling = {"height": 512, "width": 512, "num_inference_steps": 8, **blocks.pop("sampling", {})}
    model = {"family": family, "path": str(RELEASES / release)}
    return RunConfig.model_validate({"model": model, "sampling": sampling, **blocks})


@pytest.mark.parametrize(
    ("family", "release", "blocks", "fragment"),
    [
        ("sd3", "sd3-medium", {"sampling": {"height": 4096}}, "takes up to"),
        ("sd3", "sd3-medium", {"eval_sampling": {"width": 4096}}, "takes up to"),
        ("z_image", "z-image-turbo", {"sampling": {"width": 65536}}, "takes up to"),
        ("sd15", "sd1.5", {"sampling": {"num_inference_steps": 1500}}, "Lower"),
        ("flux2_klein", "flux.2-klein-4b", {"sampling": {"guidance_scale": 4.0}}, "guidance"),
        ("wan", "wan2.1-t2v-1.3b", {"sampling": {"num_frames": 6}}, "num_frames"),
    ],
)
def test_it_is_refused_before_a_weight_is_read(
    family: str, release: str, blocks: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(ModelError, match=fragment):
        require_makeable(config(family, release, **blocks))


@pytest.mark.parametrize(
    ("family", "release"), [("sd3", "sd3-medium"), ("sd15", "sd1.5"), ("wan", "wan2.1-t2v-1.3b")]
)
def test_what_it_makes_passes(family: str, release: str) -> None:
    require_makeable(config(family, release))
