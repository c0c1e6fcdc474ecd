"""Bytes a run needs beside its weights, from running its real network on tensors without memory.

In goes a recipe and the blueprint of its model; the network's own forward and backward, text
encoders and decoder run on fake tensors of the recipe's shapes, in seconds and without a GPU, and
what is alive at the worst moment is counted. Fake tensors are CPU tensors here, since autograd does
not run on fake CUDA ones without CUDA. So that the numbers are still those of a GPU,

- attention is torch's fused one, which keeps queries, keys, values, output and log-sum-exp and
  never holds a length x length matrix, as GPUs' flash and memory-efficient kernels do;
- autocast follows the GPU's rules (`planning.gpu_autocast`);
- AdamW steps over all tensors at once, as it does on GPUs.

Not counted: what a kernel takes for itself during one call (convolution and matrix product
workspaces, the accumulators of attention's backward), the allocator's rounding and fragmentation,
the CUDA context. On several ranks everything is for one rank's share of the samples.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed._composable import checkpoint

from unirl.algorithms.base import BASE, Policy
from unirl.algorithms.making import make_algorithm
from unirl.config.catalog import MODELS
from unirl.config.components import is_own
from unirl.config.resources import ASSETS
from unirl.config.schema import RunConfig
from unirl.core.types import (
    Conditioning,
    PromptBatch,
    PromptRecord,
    Rewards,
    RolloutRequest,
    ScoredRollout,
    Trajectory,
)
from unirl.models.base import DiffusionModel
from unirl.models.blocks import find_blocks
from unirl.planning.blueprint import Blueprint
from unirl.planning.gpu_autocast import gpu_autocast
from unirl.planning.live_bytes import LiveBytes
from unirl.planning.weightless import WeightlessMode, make_weightless
from unirl.samplers.kernels import make_kernel
from unirl.train.activation_checkpointing import checkpoint_activations
from unirl.trainer.requests import RequestFactory

T = TypeVar("T")


@dataclass(frozen=True)
class Workspace:
    """Bytes on one device beside weights and optimizer moments, each the peak of its moment.

    Sampling fields are the larger of a training rollout's and, where there are evaluations, of an
    evaluation chunk's.
    """

    num_micro_rows: int
    """Rows in a micro-batch: stack.micro_batch_size, or fewer where an update has no more."""
    train: int
    """Forward and backward of one micro-batch: inputs, saved activations and temporaries, without
    the gradients of trained weights."""
    train_other_checkpointing: int
    """The same with the opposite of the recipe's backend.activation_checkpointing."""
    grads: int
    """Gradients of the trained weights, float32; there from the first backward to the step."""
    rows: int
    """The window's rows as the update holds them, from its begin to its end."""
    optimizer_step: int
    """What AdamW allocates during a step: one intermediate for every trained value."""
    encode: int
    """Text encoders on the prompts of a request, result included."""
    rollout: int
    """One denoising step on a batch of rollout.forward_batch_size; guidance doubles it."""
    decode: int
    """The decoder on such a batch, images included."""
    rollout_kept: int
    """Conditioning and recorded latents of all samples of a rollout, from sampling until the
    update that uses them; accumulate_rollouts of them add up."""


def estimate_workspace(config: RunConfig, blueprint: Blueprint) -> Workspace:
    """The workspace of a recipe, from fake tensors; the blueprint has encoders and stays as it is.

    Raises ModelError for an image size the model does not take and for unknown block classes.
    """
    model = copy.deepcopy(blueprint.model)  # on the meta device, where a copy costs nothing
    requests = _requests(config, model)
    for module in [model.network, *model.frozen_modules.values()]:
        make_weightless(module)
    with WeightlessMode(), gpu_autocast():
        return _measure(config, model, blueprint.block_classes, requests)


def measure_workspace(
    config: RunConfig, model: DiffusionModel, block_classes: Sequence[str]
) -> Workspace:
    """The same counted on a model that is there, at its real cost; for checking the estimate.

    The model keeps gradients and (disabled) checkpointing hooks.
    """
    return _measure(config, model, block_classes, _requests(config, model))


def _requests(config: RunConfig, model: DiffusionModel) -> list[RolloutRequest]:
    """What one device samples at once: for training, then for an evaluation where there is one."""
    factory = RequestFactory(config, model, make_algorithm(config.algorithm))
    requests = [factory.training(0, _prompts(config.batch_size, config))]
    if config.eval_interval:
        requests += [
            factory.evaluation(_prompts(num_prompts, config), num_samples)
            for num_prompts, num_samples in sorted(set(config.eval_chunks))
        ]
    return requests


def _prompts(num_prompts: int, config: RunConfig) -> PromptBatch:
    """One device's share of so many prompts; the empty text is one that every family takes, with
    the fewest images it takes, and all are taught by the first teacher where there are several."""
    share = math.ceil(num_prompts / config.num_devices)
    domain = next(iter(config.algorithm.teachers), None)
    family = config.model.family
    num_images = 0 if is_own(family) else MODELS[family].num_images.start
    images = (str(ASSETS / "blank.png"),) * num_images
    record = PromptRecord("", "", {config.algorithm.teacher_key: domain}, images)
    return PromptBatch((record,) * share)


def _measure(
    config: RunConfig,
    model: DiffusionModel,
    block_classes: Sequence[str],
    requests: Sequence[RolloutRequest],
) -> Workspace:
    with torch.no_grad():
        encode = _encode_peak(model, requests)
        sampled = [
            _sampling_peaks(model, request, config.rollout.forward_batch_size)
            for request in _of_each_size(model, requests)
        ]
    denoise, decode, kept = (max(peaks) for peaks in zip(*sampled, strict=True))
    update = _Update(config, model, requests[0])
    plain, checkpointed = _train_peaks(model, block_classes, update)
    checkpoints = config.backend.activation_checkpointing
    trained_bytes = sum(p.nbytes for p in model.network.parameters() if p.requires_grad)
    return Workspace(
        num_micro_rows=update.num_micro_rows,
        train=checkpointed if checkpoints else plain,
        train_other_checkpointing=plain if checkpoints else checkpointed,
        grads=trained_bytes,
        rows=config.accumulate_rollouts * update.row_bytes,
        optimizer_step=trained_bytes,
        encode=encode,
        rollout=denoise,
        decode=decode,
        rollout_kept=kept,
    )


# --- training -----------------------------------------------------------------------------------


class _Update:
    """The algorithm's own loss on a rollout without values."""

    def __init__(
        self,
        config: RunConfig,
        model: DiffusionModel,
        request: RolloutRequest,
    ) -> None:
        self._algorithm = make_algorithm(config.algorithm, _brightness)
        names = (BASE, *self._algorithm.shadows(), *self._algorithm.teachers())
        # Exchanging weights takes no memory that counts; without an adapter there is no base.
        self._policy = Policy(model, dict.fromkeys(names, nullcontext), progress=0.0)
        with torch.no_grad():
            # Samples of equal starts share a forward in some micro-batches, but not in all.
            apart = replace(request, initial_noise_keys=request.step_noise_keys)
            scored = _scored_rollout(model, apart)
            path = scored.trajectory
            sampled = [getattr(path, f.name) for f in fields(path)]
            with LiveBytes([*sampled, scored.advantages, scored.places]) as live:
                rows = self._algorithm.rows([scored])
        self.row_bytes = live.now
        num_rows = len(rows) * config.accumulate_rollouts
        per_update = math.ceil(num_rows / config.stack.num_updates_per_batch)
        self.num_micro_rows = min(config.stack.micro_batch_size, per_update)
        micro = torch.arange(self.num_micro_rows)
        with torch.no_grad():
            # No row twice: rows of one state share a forward.
            rows = self._algorithm.rows([scored] * math.ceil(self.num_micro_rows / len(rows)))
            self._rows, _ = self._algorithm.anchor(self._policy, rows.select(micro), [micro])
        self._micro = micro

    def backward(self) -> None:
        """Of one micro-batch."""
        self._algorithm.loss(self._policy, self._rows.select(self._micro)).loss.sum().backward()


def _brightness(images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
    """Stands in for the scorers where the reward is differentiated; theirs is not counted."""
    return images.flatten(1).mean(dim=1)


def _scored_rollout(model: DiffusionModel, request: RolloutRequest) -> ScoredRollout:
    count = len(request)
    scores, trained = torch.zeros(count), torch.ones(count, dtype=torch.bool)
    return ScoredRollout(
        request,
        _trajectory(model, request),
        *_told(model, request, count),
        torch.arange(count),
        Rewards(scores, {}, trained),
        scores,
        trained,
    )


def _trajectory(model: DiffusionModel, request: RolloutRequest) -> Trajectory:
    count, shape = len(request), model.latent_shape(request.sampling)
    recorded = (count, request.num_sde_steps, *shape)
    return Trajectory(
        latents=torch.zeros(recorded),
        next_latents=torch.zeros(recorded),
        log_probs=torch.zeros(recorded[:2]),
        steps=torch.zeros(recorded[:2], dtype=torch.long),
        kept_latents=torch.zeros(count, len(request.kept_steps), *shape),
        final_latents=torch.zeros(count, *shape),
    )


def _train_peaks(
    model: DiffusionModel, block_classes: Sequence[str], update: _Update
) -> tuple[int, int]:
    """(without, with) activation checkpointing."""
    for parameter in model.network.parameters():
        if parameter.requires_grad:  # so it is for all micro-batches but the first
            parameter.grad = torch.zeros_like(parameter)
    blocks = find_blocks(model.network, block_classes)
    plain, _ = _measured(model, update.backward)
    checkpoint_activations(blocks)
    checkpointed, _ = _measured(model, update.backward)
    for block in blocks:
        checkpoint.state(block).enable_hook = False
    return plain, checkpointed


def _told(
    model: DiffusionModel, request: RolloutRequest, count: int
) -> tuple[Conditioning, Conditioning | None]:
    """What the network is told about `count` samples of the request's first prompt, and what
    guidance leads away from."""
    prompts, samples = request.prompts.records[:1], torch.zeros(count, dtype=torch.long)
    conditioning = model.encode(prompts, request.sampling)
    negative = model.encode_negative(prompts, request.sampling)
    return conditioning.select(samples), None if negative is None else negative.select(samples)


# --- sampling -----------------------------------------------------------------------------------


def _encode_peak(model: DiffusionModel, requests: Sequence[RolloutRequest]) -> int:
    """On the request with the most prompts."""
    most = max(requests, key=lambda request: len(request.prompts))
    peak, _ = _measured(model, lambda: model.encode(most.prompts.records, most.sampling))
    return peak


def _of_each_size(
    model: DiffusionModel, requests: Sequence[RolloutRequest]
) -> list[RolloutRequest]:
    """The request of the most samples for every image size, with and without guidance."""
    largest = {}
    for request in sorted(requests, key=len):
        sampling = request.sampling
        size = sampling.height, sampling.width, sampling.num_frames
        largest[size, sampling.decoded_frames, model.needs_negative(sampling)] = request
    return list(largest.values())


def _sampling_peaks(
    model: DiffusionModel, request: RolloutRequest, forward_batch_size: int
) -> tuple[int, int, int]:
    """(denoising step, decoder, rollout result)."""
    batch = min(forward_batch_size or len(request), len(request))
    latents = torch.zeros(batch, *model.latent_shape(request.sampling))
    told = _told(model, request, 1)
    denoise, _ = _measured(model, lambda: _denoise(model, request, batch, *told))
    decode, _ = _measured(model, lambda: model.decode(latents, request.sampling))
    samples = torch.zeros(len(request), dtype=torch.long)
    kept, _ = _measured(model, lambda: _rollout(model, request, samples, *told))
    return denoise, decode, kept


def _denoise(
    model: DiffusionModel,
    request: RolloutRequest,
    batch: int,
    conditioning: Conditioning,
    negative: Conditioning | None,
) -> Tensor:
    """One stochastic step of sampling, with its log-prob. Picks distinct rows and spreads the
    answers, as sampling does."""
    latents = torch.zeros(batch, *model.latent_shape(request.sampling))
    sigma, sigma_next = (torch.full((batch,), s) for s in request.sigmas[1:3])
    index = torch.zeros(batch, dtype=torch.long)
    velocity = model.guided_velocity(
        latents[index],
        sigma[index],
        conditioning.select(index),
        None if negative is None else negative.select(index),
        request.sampling,
    )[index]
    kernel = make_kernel(request.sampling.kernel, request.sampling.eta, request.sigmas)
    gaussian = kernel.transition(latents, velocity, sigma, sigma_next)
    return gaussian.log_prob(gaussian.sample(torch.zeros_like(latents)))


def _rollout(
    model: DiffusionModel,
    request: RolloutRequest,
    samples: Tensor,
    conditioning: Conditioning,
    negative: Conditioning | None,
) -> tuple[object, ...]:
    """What an engine returns, but for the images, which are on the host."""
    return (
        conditioning.select(samples),
        None if negative is None else negative.select(samples),
        _trajectory(model, request),
    )


def _measured(model: DiffusionModel, function: Callable[[], T]) -> tuple[int, T]:
    """Most bytes alive during a call, beside weights, buffers and gradients; and its result."""
    modules = [model.network, *model.frozen_modules.values()]
    weights = [tensor for m in modules for tensor in (*m.parameters(), *m.buffers())]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    with LiveBytes(excluded=[*weights, *gradients]) as live:
        result = function()
    return live.peak, result
