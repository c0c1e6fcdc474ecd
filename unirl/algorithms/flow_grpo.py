"""Flow-GRPO (arXiv:2505.05470): clipped policy gradient on the log-probs of SDE steps.

    ratio = exp(log_prob_new - log_prob_old)
    loss  = mean over samples and recorded steps of
            max(-A ratio, -A clip(ratio, 1 - clip_range, 1 + clip_range_high)) + kl_coefficient KL

Log-probs are means over latent elements. DanceGRPO is the same loss with the dance kernel, MixGRPO
with a moving window of SDE steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from unirl.algorithms.base import Algorithm, RowLosses
from unirl.config.catalog import ALGORITHMS
from unirl.config.schema import AlgorithmConfig
from unirl.core.types import Conditioning, ScoredRollout
from unirl.models.base import DiffusionModel
from unirl.models.lora import adapter_disabled
from unirl.samplers.distinct import distinct, distinct_ids
from unirl.samplers.gaussian import Gaussian
from unirl.samplers.guidance import guided_velocity
from unirl.samplers.kernels import Kernel, make_kernel


@dataclass(frozen=True)
class TransitionRows:
    """R transitions of N samples, in the order (step, sample), as sampling made them."""

    latents: Tensor
    """[R, *latent] float32."""
    next_latents: Tensor
    """[R, *latent] float32."""
    sigma: Tensor
    """[R] float32."""
    sigma_next: Tensor
    """[R] float32."""
    rollout_log_prob: Tensor
    """[R] the engine's own log-prob, float32."""
    old_log_prob: Tensor
    """[R] the anchor of the ratio, float32."""
    advantages: Tensor
    """[R] float32."""
    sample_index: Tensor
    """[R] int64."""
    state: Tensor
    """[R] int64; rows of equal states have equal latents, sigma and conditioning."""
    conditioning: Conditioning
    """Of the N samples, not the rows."""
    negative_conditioning: Conditioning | None
    guidance_scale: float
    kernel: Kernel

    def __len__(self) -> int:
        return len(self.latents)

    def select(self, index: Tensor) -> Self:
        """The rows `index`; the conditioning is shared."""
        return replace(self, **{name: getattr(self, name)[index] for name in PER_ROW})


PER_ROW = (
    "latents",
    "next_latents",
    "sigma",
    "sigma_next",
    "rollout_log_prob",
    "old_log_prob",
    "advantages",
    "sample_index",
    "state",
)


class FlowGRPO(Algorithm[TransitionRows]):
    """Rows are transitions; the anchor is the engine's log-prob or a replay before the update."""

    capabilities = ALGORITHMS["flow_grpo"].capabilities

    def __init__(self, config: AlgorithmConfig) -> None:
        self._clip_low = config.clip_range
        self._clip_high = config.clip_range_high or config.clip_range
        self._replays = config.old_log_prob == "replay"
        self._kl_coefficient = config.kl_coefficient

    def rows(self, scored: Sequence[ScoredRollout]) -> TransitionRows:
        """Recorded steps of this rank's samples; samples count on through the window's rollouts."""
        parts, offset, num_rows = [], 0, 0
        for one in scored:
            part = _transitions(one)
            index = part.sample_index + offset
            parts.append(replace(part, sample_index=index, state=part.state + num_rows))
            offset += len(one)
            num_rows += len(part)
        return _concatenate(parts)

    @torch.no_grad()
    def anchor(
        self, model: DiffusionModel, rows: TransitionRows, slices: Sequence[Tensor]
    ) -> tuple[TransitionRows, Mapping[str, float]]:
        if not self._replays:
            return replace(rows, old_log_prob=rows.rollout_log_prob), {}
        old_log_prob = rows.rollout_log_prob.clone()
        for index in slices:
            part = rows.select(index)
            old_log_prob[index] = _policy(model, part).log_prob(part.next_latents)
        used = torch.cat(list(slices))
        difference = (old_log_prob - rows.rollout_log_prob)[used].abs()
        return replace(rows, old_log_prob=old_log_prob), {
            "rollout_replay_log_prob_diff_mean": float(difference.mean()),
            "rollout_replay_log_prob_diff_max": float(difference.max()),
        }

    def loss(self, model: DiffusionModel, rows: TransitionRows) -> RowLosses:
        policy = _policy(model, rows)
        log_ratio = policy.log_prob(rows.next_latents) - rows.old_log_prob
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self._clip_low, 1 + self._clip_high)
        policy_loss = torch.maximum(-rows.advantages * ratio, -rows.advantages * clipped)
        kl = self._reference_kl(model, rows, policy)
        loss = policy_loss if kl is None else policy_loss + self._kl_coefficient * kl
        details = {"log_ratio": log_ratio, "ratio": ratio, "policy_loss": policy_loss, "loss": loss}
        if kl is not None:
            details["kl_reference"] = kl
        return RowLosses(loss, {name: value.detach() for name, value in details.items()})

    def _reference_kl(
        self, model: DiffusionModel, rows: TransitionRows, policy: Gaussian
    ) -> Tensor | None:
        """[r] exact KL to the model without its adapter, nats per latent element."""
        if self._kl_coefficient == 0:
            return None
        with torch.no_grad(), adapter_disabled(model.network):
            reference = _policy(model, rows)
        return policy.kl(reference)

    def metrics(self, details: Mapping[str, Tensor]) -> Mapping[str, float]:
        ratio, log_ratio = details["ratio"], details["log_ratio"]
        high = (ratio > 1 + self._clip_high).float().mean()
        low = (ratio < 1 - self._clip_low).float().mean()
        values = {
            "loss": details["loss"].mean(),
            "policy_loss": details["policy_loss"].mean(),
            "ratio_mean": ratio.mean(),
            "ratio_std": ratio.std(correction=0),
            "ratio_min": ratio.min(),
            "ratio_max": ratio.max(),
            "log_ratio_abs_max": log_ratio.abs().max(),
            "approx_kl": 0.5 * (log_ratio**2).mean(),
            "clip_fraction": high + low,
            "clip_fraction_high": high,
            "clip_fraction_low": low,
        }
        if "kl_reference" in details:
            values["kl_reference"] = details["kl_reference"].mean()
        return {name: float(value) for name, value in values.items()}


def _policy(model: DiffusionModel, rows: TransitionRows) -> Gaussian:
    """The distribution of the next latents under the model's present weights."""
    negative = rows.negative_conditioning
    states = distinct_ids(rows.state)
    samples = rows.sample_index[states.first]
    velocity = guided_velocity(
        model,
        rows.latents[states.first],
        rows.sigma[states.first],
        rows.conditioning.select(samples),
        None if negative is None else negative.select(samples),
        rows.guidance_scale,
    )[states.kind]
    return rows.kernel.transition(rows.latents, velocity, rows.sigma, rows.sigma_next)


def _transitions(scored: ScoredRollout) -> TransitionRows:
    """[B, S, ...] trajectory of one rollout as rows in the order (step, sample)."""
    request, trajectory = scored.request, scored.trajectory
    num_samples, num_steps = trajectory.log_probs.shape
    device = trajectory.latents.device
    sigmas = torch.tensor(request.sigmas, dtype=torch.float32, device=device)
    rows = torch.arange(num_samples * num_steps)
    if num_steps:  # before the first of these steps, equal starts are still equal states
        starts = distinct(request.start_names)
        rows[:num_samples] = starts.first[starts.kind]
    steps = torch.tensor(request.sde_steps, device=device).repeat_interleave(num_samples)
    log_prob = trajectory.log_probs.T.reshape(-1)
    return TransitionRows(
        latents=trajectory.latents.transpose(0, 1).flatten(0, 1),
        next_latents=trajectory.next_latents.transpose(0, 1).flatten(0, 1),
        sigma=sigmas[steps],
        sigma_next=sigmas[steps + 1],
        rollout_log_prob=log_prob,
        old_log_prob=log_prob,
        advantages=scored.advantages[scored.places].to(device).repeat(num_steps),
        sample_index=torch.arange(num_samples, device=device).repeat(num_steps),
        state=rows.to(device),
        conditioning=scored.conditioning,
        negative_conditioning=scored.negative_conditioning,
        guidance_scale=request.sampling.guidance_scale,
        kernel=make_kernel(request.sampling.kernel, request.sampling.eta, request.sigmas),
    )


def _concatenate(parts: Sequence[TransitionRows]) -> TransitionRows:
    first = parts[0]
    if len(parts) == 1:
        return first
    per_row = {name: torch.cat([getattr(part, name) for part in parts]) for name in PER_ROW}
    negatives = [part.negative_conditioning for part in parts]
    present = [negative for negative in negatives if negative is not None]
    return replace(
        first,
        **per_row,
        conditioning=type(first.conditioning).cat([part.conditioning for part in parts]),
        negative_conditioning=type(present[0]).cat(present) if present else None,
    )
