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
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed._composable import checkpoint

from unirl.config.schema import RunConfig
from unirl.core.types import Conditioning, PromptBatch, PromptRecord, RolloutRequest
from unirl.models.base import DiffusionModel
from unirl.models.blocks import find_blocks
from unirl.models.lora import adapter_disabled
from unirl.planning.blueprint import Blueprint
from unirl.planning.gpu_autocast import gpu_autocast
from unirl.planning.live_bytes import LiveBytes
from unirl.planning.weightless import WeightlessMode, make_weightless
from unirl.samplers.gaussian import Gaussian
from unirl.samplers.guidance import guided_velocity
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

    num_transitions: int
    """In a micro-batch: stack.micro_batch_size, or fewer where an update has no more."""
    train: int
    """Forward and backward of one micro-batch: inputs, saved activations and temporaries, without
    the gradients of trained weights."""
    train_other_checkpointing: int
    """The same with the opposite of the recipe's backend.activation_checkpointing."""
    grads: int
    """Gradients of the trained weights, float32; there from the first backward to the step."""
    rows: int
    """The window's transitions as the update holds them, from its begin to its end."""
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
    factory = RequestFactory(config, model)
    requests = [factory.training(0, _prompts(config.batch_size, config))]
    if config.eval_interval:
        chunk = min(config.eval_chunk_prompts, config.eval_num_prompts)
        requests.append(factory.evaluation(_prompts(chunk, config)))
    return requests


def _prompts(num_prompts: int, config: RunConfig) -> PromptBatch:
    """One device's share of so many prompts; the empty text is one that every family takes."""
    share = math.ceil(num_prompts / config.num_devices)
    return PromptBatch((PromptRecord("", ""),) * share)


def _measure(
    config: RunConfig,
    model: DiffusionModel,
    block_classes: Sequence[str],
    requests: Sequence[RolloutRequest],
) -> Workspace:
    with torch.no_grad():
        encode, texts = _encode_peak(model, requests)
        sampled = [
            _sampling_peaks(model, request, config.rollout.forward_batch_size, texts)
            for request in _of_each_size(requests)
        ]
    denoise, decode, kept = (max(peaks) for peaks in zip(*sampled, strict=True))
    plain, checkpointed = _train_peaks(config, model, block_classes, requests[0], texts)
    checkpoints = config.backend.activation_checkpointing
    trained_bytes = sum(p.nbytes for p in model.network.parameters() if p.requires_grad)
    row_bytes = 2 * 4 * math.prod(_latent_shape(model, requests[0]))
    return Workspace(
        num_transitions=_micro_batch(config, requests[0]),
        train=checkpointed if checkpoints else plain,
        train_other_checkpointing=plain if checkpoints else checkpointed,
        grads=trained_bytes,
        rows=_num_rows(config, requests[0]) * row_bytes,
        optimizer_step=trained_bytes,
        encode=encode,
        rollout=denoise,
        decode=decode,
        rollout_kept=kept,
    )


# --- training -----------------------------------------------------------------------------------


def _train_peaks(
    config: RunConfig,
    model: DiffusionModel,
    block_classes: Sequence[str],
    request: RolloutRequest,
    texts: Conditioning,
) -> tuple[int, int]:
    """(without, with) activation checkpointing."""
    for parameter in model.network.parameters():
        if parameter.requires_grad:  # so it is for all micro-batches but the first
            parameter.grad = torch.zeros_like(parameter)

    def backward() -> None:
        _loss(config, model, request, texts).backward()

    blocks = find_blocks(model.network, block_classes)
    plain, _ = _measured(model, backward)
    checkpoint_activations(blocks)
    checkpointed, _ = _measured(model, backward)
    for block in blocks:
        checkpoint.state(block).enable_hook = False
    return plain, checkpointed


def _loss(
    config: RunConfig, model: DiffusionModel, request: RolloutRequest, texts: Conditioning
) -> Tensor:
    """Of one micro-batch: from the log-probs of transitions, with the reference KL if there is."""
    sampling = request.sampling
    index = torch.zeros(_micro_batch(config, request), dtype=torch.long)
    latents = torch.zeros(len(index), *_latent_shape(model, request))
    next_latents = torch.zeros_like(latents)
    sigma, sigma_next = (torch.full((len(index),), s) for s in request.sigmas[1:3])
    kernel = make_kernel(sampling.kernel, sampling.eta, request.sigmas)

    def policy() -> Gaussian:
        velocity = _velocity(model, request, latents, sigma, texts, index)
        return kernel.transition(latents, velocity, sigma, sigma_next)

    new = policy()
    loss = new.log_prob(next_latents)
    if config.algorithm.kl_coefficient:
        with torch.no_grad(), adapter_disabled(model.network):
            reference = policy()
        loss = loss + config.algorithm.kl_coefficient * new.kl(reference)
    return loss.sum()


def _micro_batch(config: RunConfig, request: RolloutRequest) -> int:
    """Transitions in the largest micro-batch."""
    update_rows = math.ceil(_num_rows(config, request) / config.stack.num_updates_per_batch)
    return min(config.stack.micro_batch_size, update_rows)


def _velocity(
    model: DiffusionModel,
    request: RolloutRequest,
    latents: Tensor,
    sigma: Tensor,
    texts: Conditioning,
    index: Tensor,
) -> Tensor:
    """Guided as in sampling and training, which pick the distinct rows and spread the answers."""
    guidance = request.sampling.guidance_scale
    return guided_velocity(
        model,
        latents[index],
        sigma[index],
        texts.select(index),
        texts.select(index) if guidance > 1 else None,
        guidance,
    )[index]


def _num_rows(config: RunConfig, request: RolloutRequest) -> int:
    """Transitions of a window on one device."""
    return config.accumulate_rollouts * len(request) * len(request.sde_steps)


# --- sampling -----------------------------------------------------------------------------------


def _encode_peak(
    model: DiffusionModel, requests: Sequence[RolloutRequest]
) -> tuple[int, Conditioning]:
    """On the request with the most prompts; and what the encoders said."""
    texts = max((request.prompts.texts for request in requests), key=len)
    return _measured(model, lambda: model.encode(texts))


def _of_each_size(requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
    """The request of the most samples for every image size, with and without guidance."""
    largest = {}
    for request in sorted(requests, key=len):
        sampling = request.sampling
        largest[sampling.height, sampling.width, sampling.guidance_scale > 1] = request
    return list(largest.values())


def _sampling_peaks(
    model: DiffusionModel, request: RolloutRequest, forward_batch_size: int, texts: Conditioning
) -> tuple[int, int, int]:
    """(denoising step, decoder, rollout result)."""
    batch = min(forward_batch_size or len(request), len(request))
    latents = torch.zeros(batch, *_latent_shape(model, request))
    denoise, _ = _measured(model, lambda: _denoise(model, request, batch, texts))
    decode, _ = _measured(model, lambda: model.decode(latents))
    samples = torch.zeros(len(request), dtype=torch.long)
    kept, _ = _measured(model, lambda: _rollout(model, request, texts, samples))
    return denoise, decode, kept


def _denoise(
    model: DiffusionModel, request: RolloutRequest, batch: int, texts: Conditioning
) -> Tensor:
    """One stochastic step of sampling, with its log-prob."""
    latents = torch.zeros(batch, *_latent_shape(model, request))
    sigma, sigma_next = (torch.full((batch,), s) for s in request.sigmas[1:3])
    index = torch.zeros(batch, dtype=torch.long)
    velocity = _velocity(model, request, latents, sigma, texts, index)
    kernel = make_kernel(request.sampling.kernel, request.sampling.eta, request.sigmas)
    gaussian = kernel.transition(latents, velocity, sigma, sigma_next)
    return gaussian.log_prob(gaussian.sample(torch.zeros_like(latents)))


def _rollout(
    model: DiffusionModel, request: RolloutRequest, texts: Conditioning, samples: Tensor
) -> tuple[object, ...]:
    """What an engine returns, but for the images, which are on the host, and the log-probs."""
    num_latents = 2 * len(request.sde_steps) + 1  # before and after each step, and the clean end
    return (
        texts.select(samples),
        texts.select(samples) if request.sampling.guidance_scale > 1 else None,
        torch.zeros(len(request), num_latents, *_latent_shape(model, request)),
    )


def _latent_shape(model: DiffusionModel, request: RolloutRequest) -> tuple[int, ...]:
    return model.latent_shape(request.sampling.height, request.sampling.width)


def _measured(model: DiffusionModel, function: Callable[[], T]) -> tuple[int, T]:
    """Most bytes alive during a call, beside weights, buffers and gradients; and its result."""
    modules = [model.network, *model.frozen_modules.values()]
    weights = [tensor for m in modules for tensor in (*m.parameters(), *m.buffers())]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    with LiveBytes(excluded=[*weights, *gradients]) as live:
        result = function()
    return live.peak, result
