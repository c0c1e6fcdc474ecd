"""Recorded images in place of samples: what the engine returns, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import (
    CPU,
    SIZE,
    randomize_adapter,
    records,
    rollout_request,
    sample,
    scored,
    tiny_model,
    train_stack,
)
from PIL import Image
from torch import Tensor

from unirl.core.errors import RolloutError, WeightSyncError
from unirl.core.types import PromptBatch, RolloutRequest
from unirl.models.tiny import TinyConditioning
from unirl.reward.scorers.recorded import PreferenceScorer
from unirl.rollout.echo import require_as_asked
from unirl.rollout.recorded import RecordedEngine, read_image


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """Four images of the sampling size, all different."""
    paths = []
    for number in range(4):
        pixels = torch.randint(
            256, (SIZE, SIZE, 3), generator=torch.Generator().manual_seed(number)
        )
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(pixels.to(torch.uint8).numpy()).save(paths[-1])
    return paths


def pixels_of(path: Path) -> Tensor:
    return torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)


def request_for(images: list[list[Path]], **changes: Any) -> RolloutRequest:
    """One prompt per list of images."""
    request = rollout_request(
        num_prompts=len(images), samples_per_prompt=2, sde_steps=(), **changes
    )
    prompts = [
        replace(record, metadata={"images": [str(path) for path in paths]})
        for record, paths in zip(records(len(images)), images, strict=True)
    ]
    return replace(request, prompts=PromptBatch(tuple(prompts)))


def engine(forward_batch_size: int = 0, version: int = 0) -> RecordedEngine:
    model = tiny_model()
    randomize_adapter(model)
    return RecordedEngine(model, forward_batch_size, CPU, lambda: version, nullcontext)


@pytest.mark.parametrize("forward_batch_size", [0, 3])
@pytest.mark.parametrize("guidance_scale", [1.0, 2.0])
def test_a_prompts_images_are_its_samples_in_order(pictures, forward_batch_size, guidance_scale):
    request = request_for([pictures[:2], pictures[2:]], guidance_scale=guidance_scale)
    rollout = engine(forward_batch_size).generate(request)
    require_as_asked(request, rollout)
    assert torch.equal(rollout.images, torch.stack([pixels_of(path) for path in pictures]))
    latents = rollout.trajectory.final_latents
    assert latents.dtype == torch.float32
    torch.testing.assert_close(latents, rollout.images.float() / 127.5 - 1)
    sampled = sample(tiny_model(), rollout_request(samples_per_prompt=2, sde_steps=()))
    assert isinstance(rollout.conditioning, TinyConditioning)
    assert isinstance(sampled.conditioning, TinyConditioning)
    assert torch.equal(rollout.conditioning.token_ids, sampled.conditioning.token_ids)
    assert (rollout.negative_conditioning is None) == (guidance_scale == 1)
    assert rollout.trajectory.log_probs.shape == (4, 0)


def test_prompts_without_images_are_sampled_with_the_trained_weights():
    model = tiny_model()
    randomize_adapter(model)
    request = rollout_request(sde_steps=())
    rollout = engine().generate(request)
    assert torch.equal(rollout.images, sample(model, request).images)
    with pytest.raises(WeightSyncError, match="version 1, holding 0"):
        engine().generate(replace(request, weight_version=1))


def test_an_image_of_another_size_is_resized_and_one_of_another_shape_refused(tmp_path):
    path = tmp_path / "large.png"
    Image.new("RGB", (64, 32), (200, 10, 30)).save(path)
    image = read_image(path, 16, 32)
    assert image.shape == (3, 16, 32)
    assert image.unique().tolist() == [10, 30, 200]
    with pytest.raises(RolloutError, match=r"is 64 x 32, another shape than the 32 x 32"):
        read_image(path, 32, 32)


def test_a_grey_image_has_three_channels(tmp_path):
    path = tmp_path / "grey.png"
    Image.new("L", (8, 8), 77).save(path)
    assert torch.equal(read_image(path, 8, 8), torch.full((3, 8, 8), 77, dtype=torch.uint8))


@pytest.mark.parametrize("content", [b"no image", b""])
def test_a_file_that_is_no_image_is_named(tmp_path, content):
    path = tmp_path / "broken.png"
    path.write_bytes(content)
    with pytest.raises(RolloutError, match=r"broken\.png cannot be read"):
        read_image(path, 8, 8)


def test_requests_that_images_cannot_answer_are_refused(pictures):
    with pytest.raises(RolloutError, match="names 1 images for 2 samples"):
        engine().generate(request_for([pictures[:2], pictures[2:3]]))
    steps = replace(request_for([pictures[:2]]), sde_steps=((0,), (0,)))
    with pytest.raises(RolloutError, match=r"sampling\.eta=0"):
        engine().generate(steps)
    with pytest.raises(RolloutError, match="no denoising steps"):
        engine().generate(replace(request_for([pictures[:2]]), kept_steps=(1,)))


def test_the_first_image_of_each_prompt_is_the_preferred_one(pictures):
    pairs = request_for([pictures[:2], pictures[2:]])
    images = torch.zeros(4, 3, SIZE, SIZE, dtype=torch.uint8)
    score = PreferenceScorer().score
    assert score(images, pairs.sample_records).tolist() == [1, 0, 1, 0]
    same = replace(pairs, prompts=PromptBatch(pairs.prompts.records[:1] * 2))
    assert score(images, same.sample_records).tolist() == [1, 0, 1, 0]
    assert score(images, rollout_request(num_prompts=1).sample_records).tolist() == [0] * 4


def test_dpo_on_recorded_pairs_learns_what_was_preferred(pictures):
    model = tiny_model()
    recorded = RecordedEngine(model, 0, CPU, lambda: 0, nullcontext)
    rollout = recorded.generate(request_for([pictures[:2], pictures[2:]]))
    rewards = PreferenceScorer().score(rollout.images, rollout.request.sample_records)
    stack = train_stack(
        model,
        {
            "algorithm.path": "diffusion_dpo",
            "stack.optimizer.learning_rate": 1e-2,
            "algorithm.preference_beta": 10.0,
        },
    )
    one = scored(rollout, rewards)
    stats = [stack.update([one])[0].metrics for _ in range(8)]
    assert stats[-1]["loss"] < 0.9 * stats[0]["loss"]
    assert stats[-1]["preference_accuracy"] == 1
