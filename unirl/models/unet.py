"""What Stable Diffusion's UNets share: SD 1.5 and SDXL.

They predict noise (or v) at one of 1000 trained timesteps. Here they are velocity models in the
coordinates of `samplers.parametrisation`: the loop's latents are y = x / (alpha + sigma), its
levels those of the scheduler's timesteps, and the first one lies below 1. Of the folder's scheduler
only betas, prediction type and timestep spacing count: ODE steps here are DDIM, whichever solver
the folder names.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    LMSDiscreteScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
)
from torch import Tensor

from unirl.core.errors import ModelError
from unirl.core.types import Conditioning, SamplingParams
from unirl.models.pipeline_model import PipelineModel
from unirl.samplers.parametrisation import (
    flow_level,
    from_flow,
    velocity_from_epsilon,
    velocity_from_v,
)

SCHEDULERS: Mapping[str, Any] = {
    scheduler.__name__: scheduler
    for scheduler in (
        DDIMScheduler,
        PNDMScheduler,
        DDPMScheduler,
        EulerDiscreteScheduler,
        EulerAncestralDiscreteScheduler,
        DPMSolverMultistepScheduler,
        UniPCMultistepScheduler,
        HeunDiscreteScheduler,
        LMSDiscreteScheduler,
    )
}
"""Those that published folders name."""

CLIP_TOKENS = 77
"""Length every prompt is padded or cut to."""

_VELOCITIES = {"epsilon": velocity_from_epsilon, "v_prediction": velocity_from_v}


class TrainedLevels:
    """The noise levels that a network was trained on, one per timestep, and those it is run on."""

    def __init__(self, scheduler: Any, steps_offset: int | None = None) -> None:
        """scheduler: the folder's; steps_offset: in place of the one its config has.

        Raises ModelError for a prediction that cannot be turned into a velocity.
        """
        changes: dict[str, Any] = {} if steps_offset is None else {"steps_offset": steps_offset}
        self._ddim: Any = DDIMScheduler.from_config(scheduler.config, **changes)
        levels = [flow_level(alpha) for alpha in self._ddim.alphas_cumprod.tolist()]
        prediction = self._ddim.config["prediction_type"]
        if prediction not in _VELOCITIES or (prediction == "epsilon" and levels[-1] == 1):
            raise ModelError(
                f"scheduler_config.json says prediction_type={prediction} with noise levels up to "
                f"{levels[-1]:g}. This family reads epsilon below level 1, and v_prediction."
            )
        self.velocity = _VELOCITIES[prediction]
        """(x, prediction, s) -> velocity, see `samplers.parametrisation`."""
        self._levels = levels
        ascending = torch.tensor(levels)
        self._between = (ascending[1:] + ascending[:-1]) / 2

    def timesteps(self, sigma: Tensor) -> Tensor:
        """[B] int64: the trained timestep whose level is nearest to sigma [B]."""
        self._between = self._between.to(sigma.device)
        return torch.bucketize(sigma, self._between)

    def sigmas(self, num_steps: int) -> tuple[float, ...]:
        """T levels at the scheduler's timesteps, then 0. Raises ModelError for too many steps."""
        known = len(self._levels)
        if num_steps > known:
            raise ModelError(
                f"sampling.num_inference_steps={num_steps}, but the network knows {known} "
                "timesteps. Lower sampling.num_inference_steps."
            )
        self._ddim.set_timesteps(num_steps)
        timesteps = self._ddim.timesteps.tolist()
        if timesteps[0] >= known:
            raise ModelError(
                f"sampling.num_inference_steps={num_steps} begins at timestep {timesteps[0]}, but "
                f"the network knows {known}. Lower sampling.num_inference_steps."
            )
        return (*(self._levels[timestep] for timestep in timesteps), 0.0)


class UNetModel(PipelineModel):
    """A UNet, its text encoders and its VAE; a family says how prompts reach the UNet."""

    @cached_property
    def levels(self) -> TrainedLevels:
        return TrainedLevels(self.scheduler)

    @abstractmethod
    def prediction(self, x: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """[B, C, h, w] noise or v for the network's own latents x, timesteps [B] int64."""

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        x = from_flow(latents, sigma)
        with self.arithmetic(latents):
            prediction = self.prediction(x, self.levels.timesteps(sigma), conditioning)
        return self.levels.velocity(x, prediction.float(), sigma)

    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        vae = self.pipeline.vae
        scaled = latents / vae.config["scaling_factor"]
        decoded = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return self.pipeline.image_processor.postprocess(decoded, output_type="pt").float()

    @torch.no_grad()
    def latents_of(self, images: Tensor) -> Tensor:
        vae = self.pipeline.vae
        scaled = (images.to(vae.device).float() / 127.5 - 1).to(vae.dtype)
        # The mean of the encoder's distribution: the same image gives the same latents.
        return (vae.encode(scaled).latent_dist.mode() * vae.config["scaling_factor"]).float()

    def latent_shape(self, sampling: SamplingParams) -> tuple[int, ...]:
        """Raises ModelError for a size that the VAE does not halve evenly, and for networks that
        are guided by an input or latents that are not only scaled."""
        unet, vae = self.folder.config("unet"), self.folder.config("vae")
        if unet.get("time_cond_proj_dim") is not None or vae.get("latents_mean") is not None:
            raise ModelError(
                f"model.path={self.folder.path}: the UNet takes guidance as an input "
                "(time_cond_proj_dim) or the VAE shifts its latents (latents_mean); "
                f"model.family={self.parts.family} supports neither."
            )
        factor = 2 ** (len(vae["block_out_channels"]) - 1)
        self.require_multiple(sampling, factor, f"VAE factor {factor}")
        return (unet["in_channels"], sampling.height // factor, sampling.width // factor)

    def sigmas(self, sampling: SamplingParams) -> tuple[float, ...]:
        """At the timesteps of the folder's scheduler, the first of them below 1."""
        return self.levels.sigmas(sampling.num_inference_steps)
