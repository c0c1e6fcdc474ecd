"""What Wan's families share: one or two networks, guidance, schedule, VAE and frames.

Latents are [16, 1 + (F - 1) / 4, H / 8, W / 8]. Wan 2.2 has two networks: `transformer` at high
noise, `transformer_2` below the folder's boundary_ratio; they are trained as one
`NoiseLevelExperts`. Guidance asks the network twice, one answer after the other. With the UniPC
scheduler that the published folders have (sampling.solver=unipc) the network is told whole
timesteps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline
from torch import Tensor, nn

from unirl.core.errors import ModelError
from unirl.core.types import Conditioning, PromptRecord, SamplingParams
from unirl.models.base import LoadSettings
from unirl.models.diffusers_folder import DiffusersFolder
from unirl.models.experts import NoiseLevelExperts
from unirl.models.flow_match import scheduler_sigmas, whole_timesteps
from unirl.models.lora import adapter_parameters
from unirl.models.lora_export import write_lora
from unirl.models.pipeline_model import PipelineModel
from unirl.models.video_frames import decoded_one_by_one, num_latent_frames, video_pixels
from unirl.samplers.guidance import classifier_free_apart

SCHEDULERS: Mapping[str, Any] = {
    "UniPCMultistepScheduler": UniPCMultistepScheduler,
    "FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler,
}


class WanFlowModel(PipelineModel):
    """A family whose network is a WanTransformer3DModel, or two of them."""

    def __init__(
        self,
        folder: DiffusersFolder,
        networks: Mapping[str, Any],
        frozen: Mapping[str, Any] | None,
        settings: LoadSettings,
    ) -> None:
        super().__init__(folder, networks, frozen, settings)
        self._network = _whole_network(folder, networks, self._num_timesteps)

    @property
    def network(self) -> nn.Module:
        return self._network

    def network_files(self) -> Mapping[str, Sequence[Path]]:
        if not self._has_experts:
            return super().network_files()
        return {f"{name}.": self.folder.network_files(name) for name in self.networks}

    def write_adapter(self, folder: Path) -> Path:
        """With two networks the second one's file is in `folder`/transformer_2, for diffusers'
        `load_lora_weights(folder + "/transformer_2", load_into_transformer_2=True)`."""
        if not self._has_experts or not adapter_parameters(self.network):
            return super().write_adapter(folder)
        # PEFT notes an adapter on the module it was attached to, and these are written one by one.
        for expert in self.networks.values():
            expert.peft_config = self.network.peft_config
        first, second = self.networks.values()
        pipeline_class = self.folder.pipeline_class
        write_lora(pipeline_class, {"transformer": second}, folder / "transformer_2")
        return write_lora(pipeline_class, {"transformer": first}, folder)

    def encode_texts(self, prompts: Sequence[PromptRecord]) -> Tensor:
        """[B, max_sequence_length, D]."""
        # Of the pipeline from text: the other one's is the same but fails without the package ftfy.
        return WanPipeline._get_t5_prompt_embeds(
            self.pipeline,
            [prompt.text for prompt in prompts],  # type: ignore[arg-type]
            device=self.pipeline.text_encoder.device,
            max_sequence_length=self.settings.max_sequence_length,
        )

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        with self.arithmetic(latents):
            (velocity,) = self.network(
                timestep=self._timesteps(sigma),
                return_dict=False,
                **self.network_inputs(latents, conditioning),
            )
        return velocity.float()

    @abstractmethod
    def network_inputs(self, latents: Tensor, conditioning: Conditioning) -> dict[str, Tensor]:
        """What the network is given beside the time: tensors of B rows by its argument names."""

    def guided_velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        sampling: SamplingParams,
    ) -> Tensor:
        """[B, *latent] classifier-free guidance, each row with the scale of its expert."""
        scales = self._guidance_scales(sigma, sampling).view(-1, 1, 1, 1, 1)
        return classifier_free_apart(self.velocity, latents, sigma, conditioning, negative, scales)

    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        return video_pixels(
            self._frames, latents, sampling.decoded_frames, first_frame_stands_alone=True
        )

    @torch.no_grad()
    def decode(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        return decoded_one_by_one(self.pixels, latents, sampling)

    @torch.no_grad()
    def latents_of(self, images: Tensor) -> Tensor:
        """Of videos [B, F, 3, H, W] uint8."""
        vae = self.pipeline.vae
        video = images.to(vae.device).float().transpose(1, 2) / 127.5 - 1
        mean, inverse_std = self._latent_statistics(vae.device)
        # The mean of the encoder's distribution: the same video gives the same latents.
        encoded = vae.encode(video.to(vae.dtype)).latent_dist.mode()
        return ((encoded - mean) * inverse_std).float()

    def latent_shape(self, sampling: SamplingParams) -> tuple[int, ...]:
        """Raises ModelError also for guidance of a second network that is not there."""
        self._check_guidance(sampling)
        config, halvings = self.folder.config("vae"), self._halvings
        factor, patch = 2 ** len(halvings), self.folder.config("transformer")["patch_size"]
        self.require_multiple(sampling, factor * patch[1], f"VAE factor {factor} x patch")
        num_frames = num_latent_frames(sampling, 2 ** sum(halvings))
        return (config["z_dim"], num_frames, sampling.height // factor, sampling.width // factor)

    def sigmas(self, sampling: SamplingParams) -> tuple[float, ...]:
        """What the pipeline's `set_timesteps(num_steps)` gives, with the folder's flow_shift."""
        return scheduler_sigmas(self.scheduler, sampling.num_inference_steps)

    def example_texts(self, batch: int, generator: torch.Generator) -> Tensor:
        """[batch, max_sequence_length, D] random embeddings, on the CPU."""
        width = self.folder.config("transformer")["text_dim"]
        return torch.randn(batch, self.settings.max_sequence_length, width, generator=generator)

    def _frames(self, latents: Tensor) -> Tensor:
        """[B, F, 3, H, W] in [0, 1]."""
        vae = self.pipeline.vae
        mean, inverse_std = self._latent_statistics(latents.device)
        scaled = latents.to(vae.dtype) / inverse_std + mean
        decoded = vae.decode(scaled, return_dict=False)[0]
        return self.pipeline.video_processor.postprocess_video(decoded, output_type="pt").float()

    @property
    def _has_experts(self) -> bool:
        return isinstance(self._network, NoiseLevelExperts)

    @property
    def _num_timesteps(self) -> int:
        return self.scheduler.config["num_train_timesteps"]

    @property
    def _halvings(self) -> Sequence[bool]:
        """For each halving of the picture, whether the number of frames is halved too."""
        return self.folder.config("vae")["temperal_downsample"]

    def _timesteps(self, sigma: Tensor) -> Tensor:
        """[B] what the scheduler would tell the network at these levels."""
        if isinstance(self.scheduler, FlowMatchEulerDiscreteScheduler):
            return sigma * self._num_timesteps
        return whole_timesteps(sigma, self._num_timesteps)

    def _guidance_scales(self, sigma: Tensor, sampling: SamplingParams) -> Tensor:
        """[B] guidance_scale, below the boundary low_noise_guidance_scale where it is set."""
        scales = torch.full_like(sigma, sampling.guidance_scale)
        low = sampling.low_noise_guidance_scale
        if low is None or not isinstance(self._network, NoiseLevelExperts):
            return scales
        return scales.masked_fill(self._timesteps(sigma) < self._network.boundary, low)

    def _check_guidance(self, sampling: SamplingParams) -> None:
        if sampling.low_noise_guidance_scale is not None and not self._has_experts:
            raise ModelError(
                f"sampling.low_noise_guidance_scale={sampling.low_noise_guidance_scale:g}, but "
                f"{self.folder.path} has one network for all noise levels. Set it to null."
            )

    def _latent_statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """[1, C, 1, 1, 1] mean of the latents and 1 / their standard deviation."""
        config, dtype = self.pipeline.vae.config, self.pipeline.vae.dtype
        shape = (1, config["z_dim"], 1, 1, 1)
        mean = torch.tensor(config["latents_mean"]).view(shape).to(device, dtype)
        return mean, 1.0 / torch.tensor(config["latents_std"]).view(shape).to(device, dtype)


def _whole_network(
    folder: DiffusersFolder, networks: Mapping[str, Any], num_timesteps: int
) -> nn.Module:
    """The one network, or both behind one call. Raises ModelError for a folder of another kind."""
    settings = folder.settings
    if settings.get("expand_timesteps"):
        raise ModelError(
            f"model.path={folder.path} has expand_timesteps (Wan 2.2 TI2V), which unirl does not "
            "run. Set model.path to Wan 2.1, or to Wan 2.2 A14B."
        )
    ratio = settings.get("boundary_ratio")
    if (ratio is not None) != ("transformer_2" in networks):
        raise ModelError(
            f"model.path={folder.path}: boundary_ratio and transformer_2 of model_index.json "
            f"belong together, found boundary_ratio={ratio} and {' and '.join(networks)}."
        )
    if ratio is None:
        return networks["transformer"]
    boundary = ratio * num_timesteps
    return NoiseLevelExperts(networks["transformer"], networks["transformer_2"], boundary).eval()
