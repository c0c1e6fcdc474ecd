"""What is Z-Image's own: its scale of guidance, its largest size, its text encoder's file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families.flux2 import tiny_qwen3
from families.z_image import CASES

from unirl.core.errors import ModelError

(CASE,) = CASES


def test_a_guidance_scale_of_one_leads_away_from_the_empty_text(tmp_path: Path) -> None:
    model = CASE.load(CASE.build(tmp_path))
    scaled = [replace(CASE.sampling, guidance_scale=scale) for scale in (0.0, 1.0)]
    assert model.encode_negative(CASE.prompts, scaled[0]) is None
    told, away = (
        model.encode(CASE.prompts, scaled[1]),
        model.encode_negative(CASE.prompts, scaled[1]),
    )
    assert away is not None
    latents = torch.randn(2, *model.latent_shape(CASE.sampling))
    sigma = torch.full((2,), 0.5)
    off, on = (
        model.guided_velocity(latents, sigma, told, negative, sampling)
        for negative, sampling in zip((None, away), scaled, strict=True)
    )
    expected = 2 * off - model.velocity(latents, sigma, away)
    torch.testing.assert_close(on, expected, rtol=0, atol=1e-4)


def test_a_side_longer_than_the_table_of_places_is_refused(tmp_path: Path) -> None:
    model = CASE.load(CASE.build(tmp_path), encoders=False)
    assert model.latent_shape(replace(CASE.sampling, width=256)) == (4, 4, 32)
    with pytest.raises(ModelError, match=r"sampling.width=272.*up to 256 x 256"):
        model.latent_shape(replace(CASE.sampling, width=272))


def test_a_language_model_with_its_head_is_read_without(tmp_path: Path) -> None:
    """Published folders hold one, though their index names the model without."""
    folder = CASE.build(tmp_path)
    expected = CASE.load(folder).encode(CASE.prompts, CASE.sampling)
    with torch.random.fork_rng(devices=[]):
        whole = tiny_qwen3(num_layers=3)
    whole.model.load_state_dict(CASE.load(folder).frozen_modules["text_encoder"].state_dict())
    whole.save_pretrained(folder / "text_encoder")
    found = CASE.load(folder).encode(CASE.prompts, CASE.sampling)
    for name, tensor in vars(expected).items():
        assert torch.equal(tensor, vars(found)[name])


def test_latents_of_images_are_the_vaes(tmp_path: Path) -> None:
    model = CASE.load(CASE.build(tmp_path))
    vae = model.frozen_modules["vae"]
    images = torch.randint(0, 256, (2, 3, 32, 64), dtype=torch.uint8)
    latents = model.latents_of(images)
    assert latents.shape == (2, *model.latent_shape(CASE.sampling))
    decoded = vae.decode(vae.encode(images / 127.5 - 1).latent_dist.mode()).sample  # type: ignore[operator]
    torch.testing.assert_close(
        model.pixels(latents, CASE.sampling), (decoded / 2 + 0.5).clamp(0, 1), rtol=0, atol=1e-5
    )
