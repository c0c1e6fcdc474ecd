"""The network that is trained: read, given its adapter, laid out over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from unirl.algorithms.making import make_algorithm
from unirl.config import catalog
from unirl.config.components import import_component, is_own
from unirl.config.resources import resolve_path
from unirl.config.schema import RunConfig
from unirl.core.types import PromptRecord
from unirl.distributed.ranks import Ranks
from unirl.models.base import DiffusionModel, Frozen
from unirl.models.blocks import block_names
from unirl.models.filling import fill_from_files
from unirl.models.lora import adapter_parameters, initial_value
from unirl.models.stored_encodings import EncodedBefore, EncodingStore, fill, missing
from unirl.models.trainable import adapter_seed, load_settings, make_trainable
from unirl.train.activation_checkpointing import checkpoint_activations
from unirl.train.backend import CopiesBackend, TrainBackend, WholeBackend, write_share
from unirl.trainer.requests import RequestFactory, evaluation_params, training_params


def require_makeable(config: RunConfig) -> None:
    """Ask the model for the shapes and noise levels of training and evaluation.

    Raises ModelError for what it does not make, before a weight is read. Families that need their
    weights to answer tell it when they are loaded.
    """
    family = _family(config)
    if family.blueprint_reads_weights:
        return
    settings = replace(load_settings(config, with_encoders=False), frozen=Frozen.NONE)
    blueprint = family.blueprint(resolve_path(config.model.path), settings)
    for params in (training_params(config), evaluation_params(config)):
        blueprint.latent_shape(params)
    RequestFactory(config, blueprint, make_algorithm(config.algorithm))


def build_model(config: RunConfig, device: torch.device, with_encoders: bool) -> DiffusionModel:
    """A whole model on `device`, with its adapter attached or all its network trainable."""
    model = _read(config, with_encoders, in_shards=False)
    make_trainable(config, model)
    for module in [model.network, *model.frozen_modules.values()]:
        module.to(device)
    return model


def build_training_model(
    config: RunConfig, device: torch.device, ranks: Ranks, with_encoders: bool
) -> tuple[DiffusionModel, TrainBackend]:
    """The model to train and how its network lies on the ranks."""
    in_shards = ranks.world_size > 1 and config.backend.mesh != "no_shard"
    model = _read(config, with_encoders, in_shards=in_shards)
    network = model.network
    checkpoints = config.backend.activation_checkpointing
    # By name: an adapter may put another module in a block's place.
    names = block_names(network, _block_classes(config)) if in_shards or checkpoints else []
    make_trainable(config, model)
    blocks = [network.get_submodule(name) for name in names]
    if checkpoints:
        checkpoint_activations(blocks)
    if in_shards:
        backend = _shard(config, model, blocks, device, ranks)
    else:
        network.to(device)
        backend = WholeBackend() if ranks.world_size == 1 else CopiesBackend()
    for module in model.frozen_modules.values():
        module.to(device)
    return model, backend


def _read(config: RunConfig, with_encoders: bool, *, in_shards: bool) -> DiffusionModel:
    family = _family(config)
    load = family.load_skeleton if in_shards else family.load
    model = load(resolve_path(config.model.path), load_settings(config, with_encoders))
    store = encoding_store(config)
    return model if store is None or not with_encoders else EncodedBefore(model, store)


def _family(config: RunConfig) -> type[DiffusionModel]:
    name = config.model.family
    return import_component(name if is_own(name) else catalog.MODELS[name].path)


def encoding_store(config: RunConfig) -> EncodingStore | None:
    """Where the encodings of model.encodings are; None where every rollout encodes."""
    if config.model.encodings is None:
        return None
    folder, path = resolve_path(config.model.encodings), resolve_path(config.model.path)
    return EncodingStore(folder, path, config.model.family, load_settings(config, True))


def encode_before(config: RunConfig, prompts: Sequence[PromptRecord], device: torch.device) -> int:
    """Write the encodings that model.encodings lacks; returns how many there were to write.

    The encoders are loaded beside a network without memory, and are gone afterwards.
    """
    store = encoding_store(config)
    if store is None:
        return 0
    samplings = [training_params(config)]
    if config.eval_interval > 0:
        samplings.append(evaluation_params(config))
    lacking = missing(store, prompts, samplings)
    if lacking:
        settings = replace(load_settings(config, True), frozen=Frozen.ALL)
        encoder = _family(config).load_skeleton(resolve_path(config.model.path), settings)
        for module in encoder.frozen_modules.values():
            module.to(device)
        fill(store, encoder, lacking)
    return len(lacking)


def _shard(
    config: RunConfig,
    model: DiffusionModel,
    blocks: Sequence[nn.Module],
    device: torch.device,
    ranks: Ranks,
) -> TrainBackend:
    """Shard the network in place; values come in only where they stay."""
    from unirl.train.sharded import ShardedBackend, make_mesh  # costs half a second to import

    network = model.network
    mesh = make_mesh(config.backend, ranks.world_size, device)
    decided = config.backend.model_copy(update={"defer_reduce": config.defers_reduce})
    backend = ShardedBackend(network, blocks, mesh, decided)
    if any(parameter.is_meta for parameter in network.parameters()):
        _fill(config, model, backend, device)
    return backend


def _fill(
    config: RunConfig, model: DiffusionModel, backend: TrainBackend, device: torch.device
) -> None:
    """Memory for the shards on `device`, and the values of files and adapter in it."""
    network = model.network
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.to_empty(device=device)
    for name, buffer in network.named_buffers():
        buffer.copy_(buffers[name])
    adapter = adapter_parameters(network)
    for name, parameter in adapter.items():
        value = initial_value(name, parameter.shape, adapter_seed(config))
        write_share(backend, parameter, value)
    rest = {name: p for name, p in network.named_parameters() if name not in adapter}
    fill_from_files(rest, model.network_files(), lambda p, value: write_share(backend, p, value))


def _block_classes(config: RunConfig) -> Sequence[str]:
    return config.backend.block_classes or catalog.MODELS[config.model.family].block_classes
