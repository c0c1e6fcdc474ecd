"""What Qwen-Image and Qwen-Image-Edit share: network call, guidance, schedule and VAE.

Latents are kept as [16, H/8, W/8] and packed into tokens of 2 x 2 for the network; the VAE is one
for videos, and an image is one frame of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.core.types import Conditioning, SamplingParams
from unirl.models.flow_match import linear_grid, resolution_shift, scheduler_sigmas
from unirl.models.flux import PATCH, packed, unpacked
from unirl.models.pipeline_model import PipelineModel

EMPTY = " "
"""What guidance leads away from: the pipelines have no default, and their examples give a space."""


@dataclass(frozen=True)
class QwenTexts(Conditioning):
    """What the vision-language model says about B prompts."""

    prompt_embeds: Tensor
    """[B, L, D] its last hidden states behind the template's opening, zeros behind the end."""
    mask: Tensor
    """[B, L] bool, True where there is a token. L differs from batch to batch."""


class QwenFlowModel(PipelineModel):
    """A family whose network is a QwenImageTransformer2DModel."""

    def answer(
        self,
        latents: Tensor,
        sigma: Tensor,
        texts: QwenTexts,
        images: Sequence[Tensor] = (),
    ) -> Tensor:
        """[B, C, h, w] velocity of latents [B, C, h, w], with the clean latents [B, C, h', w'] of
        further images beside them."""
        pictures = [latents, *images]
        shapes = [(1, p.shape[2] // PATCH, p.shape[3] // PATCH) for p in pictures]
        with self.arithmetic(latents):
            (velocity,) = self.network(
                hidden_states=torch.cat([packed(picture) for picture in pictures], dim=1),
                timestep=sigma,
                encoder_hidden_states=texts.prompt_embeds.float(),
                # The pipelines leave it out when no prompt is padded, which is the same but for
                # rounding; here a sample must not depend on the others in its batch.
                encoder_hidden_states_mask=texts.mask,
                img_shapes=[shapes] * len(latents),
                return_dict=False,
            )
        _, rows, columns = shapes[0]
        own = velocity[:, : rows * columns].float()
        return unpacked(own, rows * PATCH, columns * PATCH)

    def guided_velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        sampling: SamplingParams,
    ) -> Tensor:
        """Classifier-free guidance by two calls; each token keeps the length of its conditional
        velocity."""
        conditional = self.velocity(latents, sigma, conditioning)
        if negative is None:
            return conditional
        away = self.velocity(latents, sigma, negative)
        guided = away + sampling.guidance_scale * (conditional - away)
        _, _, height, width = latents.shape
        length = packed(conditional).norm(dim=-1, keepdim=True)
        tokens = packed(guided)
        return unpacked(tokens * (length / tokens.norm(dim=-1, keepdim=True)), height, width)

    def pixels(self, latents: Tensor, sampling: SamplingParams) -> Tensor:
        vae = self.pipeline.vae
        mean, std = self._latent_statistics(latents.device, vae.dtype)
        scaled = latents.unsqueeze(2).to(vae.dtype) / (1 / std) + mean
        decoded = vae.decode(scaled, return_dict=False)[0][:, :, 0]
        return self.pipeline.image_processor.postprocess(decoded, output_type="pt").float()

    @torch.no_grad()
    def latents_of(self, images: Tensor) -> Tensor:
        scaled = images.to(self.pipeline.vae.device).float() / 127.5 - 1
        return self.clean_latents(scaled)

    @torch.no_grad()
    def clean_latents(self, scaled: Tensor) -> Tensor:
        """[B, C, h, w] float32 of images [B, 3, H, W] in [-1, 1].

        The mean of the encoder's distribution: the same image gives the same latents.
        """
        vae = self.pipeline.vae
        mean, std = self._latent_statistics(scaled.device, vae.dtype)
        mode = vae.encode(scaled.unsqueeze(2).to(vae.dtype)).latent_dist.mode()
        return ((mode - mean) / std)[:, :, 0].float()

    def latent_shape(self, sampling: SamplingParams) -> tuple[int, ...]:
        factor = 2 ** len(self.folder.config("vae")["temperal_downsample"])
        self.require_multiple(sampling, factor * PATCH, f"VAE factor {factor} x patch {PATCH}")
        channels = self.folder.config("transformer")["in_channels"] // PATCH**2
        return (channels, sampling.height // factor, sampling.width // factor)

    def sigmas(self, sampling: SamplingParams) -> tuple[float, ...]:
        """The pipelines' own: T equal levels, shifted by the number of image tokens, then stretched
        so that the last but one is the scheduler's shift_terminal; T is at least 2."""
        _, height, width = self.latent_shape(sampling)
        num_tokens = (height // PATCH) * (width // PATCH)
        return scheduler_sigmas(
            self.scheduler,
            sampling.num_inference_steps,
            mu=resolution_shift(self.scheduler.config, num_tokens),
            grid=linear_grid(sampling.num_inference_steps),
        )

    def example_texts(self, batch: int, generator: torch.Generator) -> QwenTexts:
        """Random, of the full length."""
        length = self.settings.max_sequence_length
        width = self.folder.config("transformer")["joint_attention_dim"]
        return QwenTexts(
            torch.randn(batch, length, width, generator=generator),
            torch.ones(batch, length, dtype=torch.bool),
        )

    def _latent_statistics(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(mean, std) [1, C, 1, 1, 1] of the VAE's latents."""
        config = self.pipeline.vae.config
        mean = torch.tensor(config["latents_mean"]).view(1, -1, 1, 1, 1)
        std = torch.tensor(config["latents_std"]).view(1, -1, 1, 1, 1)
        return mean.to(device, dtype), std.to(device, dtype)
