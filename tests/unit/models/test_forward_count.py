"""Counting what the denoising network is run on, by phase."""

from __future__ import annotations

import torch
from builders import prompts, rollout_request, sample, sampling_params, tiny_model

from unirl.models.forward_count import ForwardCount
from unirl.trainer.clock import NoMeter, PhaseClock


def test_samples_count_and_guidance_counts_twice() -> None:
    model = tiny_model()
    count = ForwardCount([model.network, model.network])
    sample(model, rollout_request(num_prompts=2, samples_per_prompt=4, num_steps=5))
    assert count.totals() == {"denoiser_forwards": 8 * 5, "denoiser_backwards": 0}
    sample(model, rollout_request(num_prompts=1, num_steps=3, guidance_scale=2.0, sde_steps=(0,)))
    assert count.totals()["denoiser_forwards"] == 8 * 5 + 2 * 4 * 3


def test_a_forward_with_gradients_is_a_backward_too() -> None:
    model = tiny_model()
    count = ForwardCount([model.network])
    conditioning = model.encode(prompts(*["red cat"] * 3), sampling_params())
    model.velocity(torch.zeros(3, 3, 8, 8), torch.full((3,), 0.5), conditioning)
    assert count.totals() == {"denoiser_forwards": 3, "denoiser_backwards": 3}


def test_a_clock_gives_each_phase_its_share_and_the_outer_one_the_sum() -> None:
    done = {"denoiser_forwards": 5}
    clock = PhaseClock(NoMeter(), totals=lambda: dict(done))
    with clock.phase("total"):
        with clock.phase("rollout"):
            done["denoiser_forwards"] += 30
        with clock.phase("reward"):
            pass
        with clock.phase("train"):
            done["denoiser_forwards"] += 7
    metrics = clock.take_metrics()
    counts = {name: value for name, value in metrics.items() if "forwards" in name}
    assert counts == {
        "perf/rollout_denoiser_forwards": 30,
        "perf/train_denoiser_forwards": 7,
        "perf/total_denoiser_forwards": 37,
    }
    assert not any("forwards" in name for name in clock.take_metrics())
