"""What `start_from` lets a run begin with: the trained weights of another run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from unirl.checkpoint.finding import find_checkpoint
from unirl.checkpoint.identity import differences, identity
from unirl.checkpoint.state import read_trainer_state, read_weights
from unirl.config.schema import RunConfig
from unirl.core.errors import ConfigError
from unirl.distributed.ranks import Ranks
from unirl.models.lora import merge_adapter
from unirl.runtime.export import exact, load_trained, saved_config
from unirl.runtime.training_model import build_model

logger = logging.getLogger("unirl.runtime")


def starting_weights(config: RunConfig, ranks: Ranks) -> Callable[[], Mapping[str, Tensor]] | None:
    """Reads them on every rank; None without start_from.

    Raises ConfigError when the adapters differ, CheckpointError when there is nothing to read.
    """
    if config.start_from is None:
        return None
    path = Path(config.start_from).expanduser()
    return lambda: ranks.together(lambda: _read(find_checkpoint(path, "start_from"), config))


def _read(folder: Path, config: RunConfig) -> Mapping[str, Tensor]:
    theirs = saved_config(folder)
    _require_fit(theirs, config)
    for line in differences(read_trainer_state(folder).identity, identity(config)):
        if line.startswith("content of model.path"):
            logger.warning("start_from=%s was trained on another base: %s", folder, line)
    logger.info("beginning with the weights of %s", folder)
    weights = read_weights(folder, shadow=None)
    if theirs.stack.lora is None or config.stack.lora is not None:
        return weights
    model = build_model(_with_model_of(config, theirs), torch.device("cpu"), with_encoders=False)
    load_trained(model, weights)
    merge_adapter(model.network)
    return dict(model.network.named_parameters())


def _require_fit(theirs: RunConfig, ours: RunConfig) -> None:
    if ours.stack.lora is None or theirs.stack.lora == ours.stack.lora:
        return
    if theirs.stack.lora is None:
        raise ConfigError(
            f"start_from={ours.start_from}: all weights were trained there, and this run trains an "
            "adapter. Export it (`unirl export`) and set model.path to what it writes, or set "
            "stack.lora=null."
        )
    saved, now = theirs.stack.lora.model_dump(), ours.stack.lora.model_dump()
    differing = ", ".join(
        f"{key} {saved[key]} -> {now[key]}" for key in saved if saved[key] != now[key]
    )
    raise ConfigError(
        f"start_from={ours.start_from}: its adapter is of another shape: {differing}. Set "
        "stack.lora as it was there, or stack.lora=null to merge it in and train all weights."
    )


def _with_model_of(ours: RunConfig, theirs: RunConfig) -> RunConfig:
    """This run's base, exact, with their adapter."""
    return exact(ours).model_copy(update={"stack": theirs.stack})
