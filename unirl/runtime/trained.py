"""A model as a run samples with it, to be looked at outside the run."""

from __future__ import annotations

from pathlib import Path

import torch

from unirl.algorithms.making import make_algorithm
from unirl.checkpoint.state import NO_SHADOW, read_weights
from unirl.config.schema import RunConfig
from unirl.distributed.group import take_device
from unirl.distributed.ranks import Ranks
from unirl.models.base import DiffusionModel
from unirl.runtime.build import pick_device
from unirl.runtime.export import load_trained
from unirl.runtime.training_model import build_model, require_makeable


def take_own_device(config: RunConfig, ranks: Ranks) -> torch.device:
    """The config's device and number of threads, for this process."""
    ranks.together(lambda: take_device(config.num_devices, config.device, ranks))
    if config.num_threads > 0:
        torch.set_num_threads(config.num_threads)
    return pick_device(config.device)


def untrained_model(config: RunConfig, device: torch.device) -> DiffusionModel:
    """With encoders, as encodings on disk are those of the run's own prompts.

    Raises ModelError for samples that it does not make, before a weight is read.
    """
    require_makeable(config)
    reads_any = config.model.model_copy(update={"encodings": None})
    return build_model(config.model_copy(update={"model": reads_any}), device, with_encoders=True)


def put_weights(
    model: DiffusionModel, config: RunConfig, checkpoint: Path, shadow: str | None
) -> None:
    """Give the model a checkpoint's weights.

    shadow: None takes those that the run's rollouts sample with, `none` the trained ones.
    """
    sampled = make_algorithm(config.algorithm).sampling_weights() if shadow is None else shadow
    load_trained(model, read_weights(checkpoint, None if sampled == NO_SHADOW else sampled))
