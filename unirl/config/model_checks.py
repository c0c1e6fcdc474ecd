"""What can be wrong with a model's folder, adapter, shards and precision."""

from __future__ import annotations

import json
from collections.abc import Iterator

from unirl.config import catalog
from unirl.config.components import algorithm_capabilities, engine_capabilities, is_own
from unirl.config.keys import nearest_name
from unirl.config.problem import Problem
from unirl.config.resources import release_names, resolve_path
from unirl.config.schema import RunConfig


def model_path(config: RunConfig) -> Iterator[Problem]:
    path = resolve_path(config.model.path)
    if not config.model.path:
        yield Problem("model.path", "is empty. Set it to the model's file or folder.")
    elif not path.exists():
        yield Problem("model.path", f"is {config.model.path!r}, but {path} does not exist.")


def release(config: RunConfig) -> Iterator[Problem]:
    name = config.model.release
    if name is not None and name not in release_names():
        near = nearest_name(name, release_names())
        known = ", ".join(release_names())
        yield Problem("model.release", f"is {name!r}, which is not known: there are {known}.{near}")


def adapter(config: RunConfig) -> Iterator[Problem]:
    if config.stack.lora is not None:
        family = config.model.family
        known = () if is_own(family) else catalog.MODELS[family].lora_targets
        if config.stack.lora.target_modules is None and not known:
            yield Problem(
                "stack.lora.target_modules",
                f"is null, but no targets are known for model.family={config.model.family}. "
                "List the names of its linear layers.",
            )
        return
    yield from _reference_without_adapter(config)
    if config.save_mode == "adapter":
        yield Problem(
            "save_mode",
            "is 'adapter', but stack.lora is null, so there is none. Set save_mode=auto.",
        )


def _reference_without_adapter(config: RunConfig) -> Iterator[Problem]:
    algorithm, needs = config.algorithm, algorithm_capabilities(config)
    if algorithm.reference != "base" or not (needs.needs_reference or algorithm.kl_coefficient > 0):
        return
    ways = ["stack.lora={}"]
    if "reference" in needs.options:
        ways.append("algorithm.reference=ema")
    if not needs.needs_reference:
        ways.append("algorithm.kl_coefficient=0")
    yield Problem(
        "algorithm.reference" if "reference" in needs.options else "algorithm.kl_coefficient",
        f"compares with the base, the model without its adapter, but stack.lora is null. "
        f"Set {' or '.join(ways)}.",
    )


def blocks(config: RunConfig) -> Iterator[Problem]:
    backend = config.backend
    in_shards = config.num_devices > 1 and backend.mesh != "no_shard"
    family = config.model.family
    known = () if is_own(family) else catalog.MODELS[family].block_classes
    unknown = backend.block_classes is None and not known
    if unknown and (in_shards or backend.activation_checkpointing):
        yield Problem(
            "backend.block_classes",
            f"is null, but no blocks are known for model.family={config.model.family}. "
            "List the class names of its blocks.",
        )


def encodings(config: RunConfig) -> Iterator[Problem]:
    if config.model.encodings is None:
        return
    if config.model.family == "tiny":
        yield Problem(
            "model.encodings",
            "has nothing to keep: the tiny family has no text encoder. Set model.encodings=null.",
        )
    if config.model.family == "generic":
        yield Problem(
            "model.encodings",
            "leaves out the encoders, but model.family=generic runs whole pipelines. Set "
            "model.encodings=null.",
        )
    if config.rollout.engine == "recorded":
        yield Problem(
            "model.encodings",
            "leaves out the encoders, but rollout.engine=recorded needs the image encoder. "
            "Set model.encodings=null.",
        )


def model_folder(config: RunConfig) -> Iterator[Problem]:
    """Of a family that reads diffusers' folders: is it one of its own?"""
    family = config.model.family
    known = () if is_own(family) else catalog.MODELS[family].pipelines
    index = resolve_path(config.model.path) / "model_index.json"
    if not known or not config.model.path or not index.is_file():
        return
    try:
        found = json.loads(index.read_text())["_class_name"]
    except (ValueError, LookupError, TypeError):
        return  # told when it is read
    if found not in known:
        yield Problem(
            "model.path",
            f"is a folder of {found}, but model.family={family} reads {' or '.join(known)}. Set "
            "model.path or model.family.",
        )


def generic_pipeline(config: RunConfig) -> Iterator[Problem]:
    """Its conditioning is a number in the model's own list of prompts."""
    if config.model.family == "generic" and not engine_capabilities(config).shares_train_weights:
        yield Problem(
            "rollout.engine",
            f"is {config.rollout.engine}, a model of its own, but model.family=generic samples and "
            "trains with one pipeline. Set rollout.engine=trainside.",
        )


def quantization(config: RunConfig) -> Iterator[Problem]:
    if config.model.quantization is None:
        return
    if config.stack.lora is None:
        yield Problem(
            "model.quantization",
            "is for frozen weights, but stack.lora is null and all of them train. Set "
            "stack.lora={} or model.quantization=null.",
        )
    elif config.stack.lora.use_dora:
        yield Problem(
            "stack.lora.use_dora",
            "needs the lengths of weights that model.quantization has rounded. Set one of the two.",
        )
    if is_own(config.model.family) or not catalog.MODELS[config.model.family].pipelines:
        yield Problem(
            "model.quantization",
            f"is for families that diffusers loads, not model.family={config.model.family}. "
            "Set model.quantization=null.",
        )
    if config.num_devices > 1 and config.backend.mesh != "no_shard":
        yield Problem(
            "model.quantization",
            "cannot be put in shards. Set backend.mesh=no_shard or model.quantization=null.",
        )
    if config.save_mode == "full":
        yield Problem(
            "save_mode",
            "is 'full', but rounded weights are not saved. Set save_mode=adapter.",
        )


def dora(config: RunConfig) -> Iterator[Problem]:
    lora = config.stack.lora
    in_shards = config.num_devices > 1 and config.backend.mesh != "no_shard"
    if lora is not None and lora.use_dora and in_shards:
        yield Problem(
            "stack.lora.use_dora",
            "needs whole weights to know their lengths, but they are in shards. Set "
            "backend.mesh=no_shard or stack.lora.use_dora=false.",
        )


def gathering(config: RunConfig) -> Iterator[Problem]:
    """Keys of sharded weights that would change nothing, or that the network cannot compute in."""
    backend = config.backend
    if backend.gather_dtype == "bf16" and config.model.precision == "fp32":
        yield Problem(
            "backend.gather_dtype",
            "is bf16, but model.precision=fp32 computes with float32 weights. Set "
            "model.precision=bf16, or backend.gather_dtype=stored.",
        )
    if backend.mesh == "no_shard":
        for key, is_set in {
            "backend.gather_dtype": backend.gather_dtype != "stored",
            "rollout.unshard": config.rollout.unshard,
        }.items():
            if is_set:
                yield Problem(
                    key, "gathers shards, but with backend.mesh=no_shard there are none. Remove it."
                )


def unshard(config: RunConfig) -> Iterator[Problem]:
    if config.rollout.unshard and not engine_capabilities(config).shares_train_weights:
        yield Problem(
            "rollout.unshard",
            f"is true, but rollout.engine={config.rollout.engine} has whole weights of its own. "
            "Set rollout.unshard=false.",
        )
