"""Sampling with a model that lives in this process: what trainside and replica share."""

from __future__ import annotations

import torch

from unirl.core.types import Conditioning, Rollout, RolloutRequest, Trajectory
from unirl.models.base import DiffusionModel
from unirl.samplers.denoise import sample_trajectory
from unirl.samplers.distinct import distinct
from unirl.samplers.guidance import guided_velocity
from unirl.samplers.kernels import make_kernel
from unirl.samplers.noise import keyed_noise


@torch.no_grad()
def sample_with_model(
    model: DiffusionModel, request: RolloutRequest, forward_batch_size: int, device: torch.device
) -> Rollout:
    """Encode each prompt once, denoise in batches of forward_batch_size (0: all), decode.

    Batches do not change the samples' noise, which is keyed per sample.
    """
    per_sample = torch.arange(len(request.prompts)).repeat_interleave(request.samples_per_prompt)
    conditioning = model.encode(request.prompts.texts).select(per_sample)
    negative = None
    if request.sampling.guidance_scale > 1:
        negative = model.encode([""]).select(torch.zeros_like(per_sample))
    trajectories, images = [], []
    for rows in torch.arange(len(request)).split(forward_batch_size or len(request)):
        trajectory = _denoise(model, request, rows, conditioning, negative, device)
        trajectories.append(trajectory)
        images.append(model.decode(trajectory.final_latents).cpu())
    return Rollout(
        request, _concatenate(trajectories), conditioning, negative, images=torch.cat(images)
    )


def _denoise(
    model: DiffusionModel,
    request: RolloutRequest,
    rows: torch.Tensor,
    conditioning: Conditioning,
    negative: Conditioning | None,
    device: torch.device,
) -> Trajectory:
    sampling = request.sampling
    shape = model.latent_shape(sampling.height, sampling.width)
    step_keys = [request.step_noise_keys[row] for row in rows.tolist()]
    initial_keys = [request.initial_noise_keys[row] for row in rows.tolist()]
    starts = distinct([request.start_names[row] for row in rows.tolist()])
    each = distinct(range(len(rows)))
    # Up to its first stochastic step, a sample is told from others by its start alone.
    last_shared_step = min(request.sde_steps, default=sampling.num_inference_steps)

    def velocity(latents: torch.Tensor, sigma: torch.Tensor, step: int) -> torch.Tensor:
        asked = starts if step <= last_shared_step else each
        kinds = guided_velocity(
            model,
            latents[asked.first.to(device)],
            sigma[asked.first.to(device)],
            conditioning.select(rows[asked.first]),
            None if negative is None else negative.select(rows[asked.first]),
            sampling.guidance_scale,
        )
        return kinds[asked.kind.to(device)]

    return sample_trajectory(
        velocity,
        keyed_noise(initial_keys, shape).to(device),
        request.sigmas,
        make_kernel(sampling.kernel, sampling.eta, request.sigmas),
        request.sde_steps,
        lambda step: keyed_noise([f"{key}/step-{step}" for key in step_keys], shape).to(device),
    )


def _concatenate(parts: list[Trajectory]) -> Trajectory:
    return Trajectory(
        latents=torch.cat([part.latents for part in parts]),
        next_latents=torch.cat([part.next_latents for part in parts]),
        log_probs=torch.cat([part.log_probs for part in parts]),
        final_latents=torch.cat([part.final_latents for part in parts]),
    )
