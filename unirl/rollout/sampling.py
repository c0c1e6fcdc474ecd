"""Sampling with a model that lives in this process: what trainside and replica share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from unirl.core.types import Conditioning, Rollout, RolloutRequest, Trajectory
from unirl.models.base import DiffusionModel
from unirl.samplers.denoise import sample_trajectory
from unirl.samplers.distinct import distinct
from unirl.samplers.kernels import make_kernel
from unirl.samplers.noise import keyed_noise
from unirl.samplers.parametrisation import start_scale
from unirl.samplers.solvers import make_solver

NoteProgress = Callable[[float], None]
"""Takes how many samples of a request the work done so far makes, parts of them included."""


@torch.no_grad()
def sample_with_model(
    model: DiffusionModel,
    request: RolloutRequest,
    forward_batch_size: int,
    device: torch.device,
    note_progress: NoteProgress = lambda num_samples: None,
) -> Rollout:
    """Encode each prompt once, denoise in batches of forward_batch_size (0: all), decode.

    Batches do not change the samples' noise, which is keyed per sample. `note_progress` is told
    after each denoising step.
    """
    per_sample = torch.arange(len(request.prompts)).repeat_interleave(request.samples_per_prompt)
    records, sampling = request.prompts.records, request.sampling
    conditioning = model.encode(records, sampling).select(per_sample)
    negative = model.encode_negative(records, sampling)
    negative = None if negative is None else negative.select(per_sample)
    trajectories, images = [], []
    for rows in torch.arange(len(request)).split(forward_batch_size or len(request)):
        trajectory = _denoise(model, request, rows, conditioning, negative, device, note_progress)
        trajectories.append(trajectory)
        images.append(model.decode(trajectory.final_latents, sampling).cpu())
    return Rollout(
        request,
        concatenate(trajectories),
        conditioning,
        negative,
        images=torch.cat(images),
        sigmas=request.sigmas,
    )


def _denoise(
    model: DiffusionModel,
    request: RolloutRequest,
    rows: torch.Tensor,
    conditioning: Conditioning,
    negative: Conditioning | None,
    device: torch.device,
    note_progress: NoteProgress,
) -> Trajectory:
    sampling = request.sampling
    shape = model.latent_shape(sampling)
    step_keys = [request.step_noise_keys[row] for row in rows.tolist()]
    initial_keys = [request.initial_noise_keys[row] for row in rows.tolist()]

    def velocity(latents: torch.Tensor, sigma: torch.Tensor, step: int) -> torch.Tensor:
        asked = distinct(_state_names(request, rows.tolist(), step))
        kinds = model.guided_velocity(
            latents[asked.first.to(device)],
            sigma[asked.first.to(device)],
            conditioning.select(rows[asked.first]),
            None if negative is None else negative.select(rows[asked.first]),
            sampling,
        )
        num_steps = len(request.sigmas) - 1
        note_progress(int(rows[0]) + len(rows) * (step + 1) / num_steps)
        return kinds[asked.kind.to(device)]

    return sample_trajectory(
        velocity,
        keyed_noise(initial_keys, shape).to(device) * start_scale(request.sigmas[0]),
        request.sigmas,
        make_kernel(sampling.kernel, sampling.eta, request.sigmas),
        make_solver(sampling.solver, request.sigmas),
        [request.sde_steps[row] for row in rows.tolist()],
        lambda step: keyed_noise([f"{key}/step-{step}" for key in step_keys], shape).to(device),
        request.kept_steps,
    )


def _state_names(request: RolloutRequest, rows: Sequence[int], step: int) -> list[Hashable]:
    """Names of the samples' states before a step; equal ones are one state.

    Up to its first stochastic step, a sample is told from others by its start alone.
    """
    starts = request.start_names
    return [
        starts[row] if step <= min(request.sde_steps[row], default=step) else row for row in rows
    ]


def concatenate(parts: Sequence[Trajectory]) -> Trajectory:
    """The samples of all parts."""
    return Trajectory(
        latents=torch.cat([part.latents for part in parts]),
        next_latents=torch.cat([part.next_latents for part in parts]),
        log_probs=torch.cat([part.log_probs for part in parts]),
        steps=torch.cat([part.steps for part in parts]),
        kept_latents=torch.cat([part.kept_latents for part in parts]),
        final_latents=torch.cat([part.final_latents for part in parts]),
    )
