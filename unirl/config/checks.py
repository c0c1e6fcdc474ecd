"""What can be wrong with a configuration although each key is right by itself.

Pure except for looking at files and importing the user's own classes. Each check yields problems
and lists the keys it reads: where one of these is wrong already, its verdict would mislead.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath

from unirl.config import catalog
from unirl.config.algorithm_checks import (
    ADVANTAGE_KEYS,
    advantages,
    ignored_advantages,
    ignored_options,
    schedules,
    untrained_levels,
)
from unirl.config.components import (
    algorithm_capabilities,
    engine_capabilities,
    import_component,
    is_own,
    require_known,
)
from unirl.config.geometry import (
    batch_geometry,
    device_geometry,
    image_size,
    prompt_length,
    stochastic_steps,
)
from unirl.config.guidance_checks import guidance_of_experts, guidance_taken
from unirl.config.keys import nearest_name
from unirl.config.problem import Problem
from unirl.config.residency_checks import automatic, overlap, save_from_host, shared_base
from unirl.config.resources import release_names, resolve_path
from unirl.config.reward_checks import (
    all_scorers,
    best_metric,
    evaluation_suites,
    reward_present,
    scorer_names,
    scorer_packages,
    stop_conditions,
    trained_scorers,
)
from unirl.config.role_checks import (
    adapter_lost_on_sleep,
    available,
    differentiated_reward,
    differentiated_steps,
    distinct_samples,
    fractions,
    old_log_prob,
    recorded_steps,
    teachers,
    train_parking,
    trainside_separate,
)
from unirl.config.schema import AUTO, RunConfig, ScorerConfig
from unirl.config.tracking_checks import tracker_packages
from unirl.config.unread_keys import (
    CHOICES,
    SYNC_KEYS,
    unread_choices,
    unread_judge_weights,
    unread_kernel,
    unread_starts,
    unread_sync,
    unread_thinning,
)
from unirl.config.video_checks import frames, recorded_videos
from unirl.core.errors import ConfigError

Check = Callable[[RunConfig], Iterator[Problem]]


def problems(config: RunConfig, bad_keys: Sequence[str] = ()) -> list[Problem]:
    """All problems across keys; checks that read one of `bad_keys` are left out."""
    found = [
        problem
        for check in (_engine, _algorithm, _family, _scorers)
        for problem in check(config)
        if not _overlap([problem.key], bad_keys)
    ]
    bad_keys = [*bad_keys, *(problem.key for problem in found)]
    for check, reads in _CHECKS.items():
        if not _overlap(reads, bad_keys):
            found.extend(check(config))
    return found


def _overlap(left: Sequence[str], right: Sequence[str]) -> bool:
    """Whether a key of one list is, holds or lies in a key of the other."""
    pairs = ((f"{a}.", f"{b}.") for a in left for b in right)
    return any(a.startswith(b) or b.startswith(a) for a, b in pairs)


# Components: those that cannot be had are bad keys for the checks below.


def _engine(config: RunConfig) -> Iterator[Problem]:
    try:
        engine_capabilities(config)
    except ConfigError as error:
        yield Problem("rollout.engine", str(error))


def _algorithm(config: RunConfig) -> Iterator[Problem]:
    try:
        algorithm_capabilities(config)
    except ConfigError as error:
        yield Problem("algorithm.path", str(error))


def _family(config: RunConfig) -> Iterator[Problem]:
    try:
        require_known(config.model.family, catalog.MODELS)
    except ConfigError as error:
        yield Problem("model.family", str(error))


def _scorers(config: RunConfig) -> Iterator[Problem]:
    for key, scorer in all_scorers(config):
        try:
            require_known(scorer.path, catalog.SCORERS)
        except ConfigError as error:
            yield Problem(f"{key}.path", str(error))
        else:
            yield from _scorer_arguments(key, scorer) if is_own(scorer.path) else ()


def _scorer_arguments(key: str, scorer: ScorerConfig) -> Iterator[Problem]:
    try:
        inspect.signature(import_component(scorer.path)).bind(**scorer.args)
    except TypeError as error:
        found = f"{scorer.path} cannot be built with args {scorer.args}: {error}."
        yield Problem(f"{key}.args", found)


# Training


def _group_size(config: RunConfig) -> Iterator[Problem]:
    needs = algorithm_capabilities(config)
    if config.sampling.samples_per_prompt == 1 and (needs.needs_advantages or needs.needs_groups):
        found = (
            "advantages compare the samples of one prompt and would all be 0"
            if needs.needs_advantages
            else f"algorithm.path={config.algorithm.path} compares the samples of one prompt"
        )
        yield Problem(
            "sampling.samples_per_prompt",
            f"is 1, but {found}. Set it to 2 or more; 8 to 32 are usual.",
        )


def _updates(config: RunConfig) -> Iterator[Problem]:
    updates = config.stack.num_updates_per_batch
    if updates > 1 and not algorithm_capabilities(config).supports_multi_update:
        yield Problem(
            "stack.num_updates_per_batch",
            f"is {updates}, but algorithm.path={config.algorithm.path} allows one update per "
            "batch. Set it to 1.",
        )


def _accumulate(config: RunConfig) -> Iterator[Problem]:
    window = config.accumulate_rollouts
    if window == 1:
        return
    if config.stack.num_updates_per_batch > 1:
        yield Problem(
            "stack.num_updates_per_batch",
            f"is {config.stack.num_updates_per_batch}, but accumulate_rollouts={window} makes one "
            "update of several rollouts. Set stack.num_updates_per_batch=1 or "
            "accumulate_rollouts=1.",
        )
    if algorithm_capabilities(config).needs_ema_rollout:
        yield Problem(
            "accumulate_rollouts",
            f"is {window}, but algorithm.path={config.algorithm.path} samples with an EMA of the "
            "weights, which moves with every rollout. Set accumulate_rollouts=1.",
        )
    counts = {
        "eval_interval": config.eval_interval,
        "save_interval": config.save_interval,
        "num_rollouts": config.num_rollouts,
    }
    for key, count in counts.items():
        if count % window:
            below = count // window * window
            near = f"{below} or {below + window}" if below else f"{window}"
            yield Problem(
                key,
                f"is {count}, which is not a multiple of accumulate_rollouts={window}. "
                f"Set {key} to {near}.",
            )


def _schedule(config: RunConfig) -> Iterator[Problem]:
    schedule = config.stack.scheduler
    if schedule.total_steps is not None and schedule.total_steps <= schedule.warmup_steps:
        yield Problem(
            "stack.scheduler.total_steps",
            f"is {schedule.total_steps}, not more than warmup_steps={schedule.warmup_steps}. "
            "Raise it or lower stack.scheduler.warmup_steps.",
        )


def _adapter(config: RunConfig) -> Iterator[Problem]:
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


def _blocks(config: RunConfig) -> Iterator[Problem]:
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


def _encodings(config: RunConfig) -> Iterator[Problem]:
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


def _folder(config: RunConfig) -> Iterator[Problem]:
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


def _generic(config: RunConfig) -> Iterator[Problem]:
    """Its conditioning is a number in the model's own list of prompts."""
    if config.model.family == "generic" and not engine_capabilities(config).shares_train_weights:
        yield Problem(
            "rollout.engine",
            f"is {config.rollout.engine}, a model of its own, but model.family=generic samples and "
            "trains with one pipeline. Set rollout.engine=trainside.",
        )


def _quantization(config: RunConfig) -> Iterator[Problem]:
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


def _dora(config: RunConfig) -> Iterator[Problem]:
    lora = config.stack.lora
    in_shards = config.num_devices > 1 and config.backend.mesh != "no_shard"
    if lora is not None and lora.use_dora and in_shards:
        yield Problem(
            "stack.lora.use_dora",
            "needs whole weights to know their lengths, but they are in shards. Set "
            "backend.mesh=no_shard or stack.lora.use_dora=false.",
        )


def _gathering(config: RunConfig) -> Iterator[Problem]:
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


def _unshard(config: RunConfig) -> Iterator[Problem]:
    if config.rollout.unshard and not engine_capabilities(config).shares_train_weights:
        yield Problem(
            "rollout.unshard",
            f"is true, but rollout.engine={config.rollout.engine} has whole weights of its own. "
            "Set rollout.unshard=false.",
        )


# Surroundings


def _model_path(config: RunConfig) -> Iterator[Problem]:
    path = resolve_path(config.model.path)
    if not config.model.path:
        yield Problem("model.path", "is empty. Set it to the model's file or folder.")
    elif not path.exists():
        yield Problem("model.path", f"is {config.model.path!r}, but {path} does not exist.")


def _release(config: RunConfig) -> Iterator[Problem]:
    name = config.model.release
    if name is not None and name not in release_names():
        near = nearest_name(name, release_names())
        known = ", ".join(release_names())
        yield Problem("model.release", f"is {name!r}, which is not known: there are {known}.{near}")


def _run_directory(config: RunConfig) -> Iterator[Problem]:
    name = PurePath(config.run_name)
    if not config.run_name.strip() or name.is_absolute() or ".." in name.parts:
        yield Problem(
            "run_name",
            f"is {config.run_name!r}; it must name a folder below output_dir={config.output_dir}.",
        )


def one_beginning(config: RunConfig) -> Iterator[Problem]:
    """With auto both make sense: a first start, and every later one."""
    if config.start_from is not None and config.load_dir not in (None, AUTO):
        yield Problem(
            "start_from",
            f"is {config.start_from}, but load_dir={config.load_dir} brings weights of its own. "
            "Set one of them to null, or load_dir=auto.",
        )


def _device(config: RunConfig) -> Iterator[Problem]:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", config.device):
        yield Problem("device", f"is {config.device!r}; allowed: auto, cpu, cuda, cuda:<n>, mps.")
    elif config.num_devices > 1 and config.device not in ("auto", "cpu", "cuda"):
        yield Problem(
            "device",
            f"is {config.device!r}, one device for num_devices={config.num_devices} ranks. Set "
            "device=cuda, where each rank takes a GPU of its own, or num_devices=1.",
        )


_CHECKS: dict[Check, tuple[str, ...]] = {
    scorer_packages: ("reward.scorers", "eval_rewards", "eval_suites"),
    scorer_names: (),
    evaluation_suites: ("eval_suites", "eval_interval"),
    tracker_packages: (),
    stop_conditions: (
        "stop_on",
        "eval_rewards",
        "eval_suites",
        "reward.scorers",
        "eval_interval",
    ),
    best_metric: ("keep_best", "eval_rewards", "eval_suites", "reward.scorers"),
    one_beginning: ("load_dir", "start_from"),
    trained_scorers: ("reward.scorers",),
    reward_present: ("reward", "algorithm.path", "eval_interval", "reward_fraction"),
    ignored_options: ("algorithm",),
    ignored_advantages: ("algorithm.path", "algorithm.adv_clip_max", *ADVANTAGE_KEYS),
    unread_choices: (
        *("algorithm.path", "reward"),
        *(key for rule in CHOICES for key in (rule.key, rule.choice)),
    ),
    unread_kernel: ("eval_sampling.kernel", "eval_eta"),
    unread_starts: ("sampling",),
    unread_judge_weights: ("eval_rewards",),
    unread_sync: (*SYNC_KEYS, "rollout.engine", "stack.lora"),
    unread_thinning: ("sampling", "algorithm"),
    advantages: ("adv_best_of", "adv_group", "sampling"),
    schedules: ("sampling", "eval_sampling", "accumulate_rollouts"),
    untrained_levels: ("sampling", "eval_sampling", "model.family"),
    _group_size: ("sampling.samples_per_prompt", "algorithm.path"),
    stochastic_steps: ("sampling", "eval_sampling", "eval_eta", "algorithm.path"),
    frames: (
        *("sampling.num_frames", "sampling.decoded_frames"),
        *("eval_sampling", "model.family"),
    ),
    recorded_videos: ("rollout.engine", "model.family"),
    guidance_taken: (
        *("sampling.guidance_scale", "eval_sampling", "model.family", "model.path"),
        "model.release",
    ),
    guidance_of_experts: (
        *("sampling.low_noise_guidance_scale", "sampling.guidance_scale"),
        *("eval_sampling", "model.family"),
    ),
    prompt_length: ("model.max_sequence_length", "model.family", "model.path", "model.release"),
    image_size: ("sampling.height", "sampling.width", "eval_sampling", "model.family"),
    batch_geometry: (
        "batch_size",
        "sampling.samples_per_prompt",
        "accumulate_rollouts",
        "stack.num_updates_per_batch",
    ),
    device_geometry: ("batch_size", "num_devices", "backend.mesh", "backend.shard_size"),
    _blocks: ("backend.block_classes", "model.family", "num_devices", "backend"),
    _encodings: ("model.encodings", "model.family", "rollout.engine"),
    _folder: ("model.path", "model.family"),
    _generic: ("model.family", "rollout.engine"),
    _quantization: (
        *("model.quantization", "model.family", "stack.lora", "num_devices", "backend.mesh"),
        "save_mode",
    ),
    _dora: ("stack.lora.use_dora", "num_devices", "backend.mesh"),
    _gathering: ("backend.gather_dtype", "backend.mesh", "model.precision", "rollout.unshard"),
    _unshard: ("rollout.unshard", "rollout.engine"),
    _updates: ("stack.num_updates_per_batch", "algorithm.path"),
    _accumulate: (
        "accumulate_rollouts",
        "stack.num_updates_per_batch",
        "algorithm.path",
        "eval_interval",
        "save_interval",
        "num_rollouts",
    ),
    _schedule: ("stack.scheduler",),
    _adapter: ("stack.lora", "model.family", "algorithm", "save_mode"),
    old_log_prob: ("algorithm.old_log_prob", "rollout.engine"),
    differentiated_reward: ("reward", "algorithm.path", "reward_resident", "residency"),
    differentiated_steps: ("sampling", "algorithm", "accumulate_rollouts"),
    distinct_samples: ("sampling", "algorithm.path"),
    recorded_steps: ("rollout.engine", "algorithm.path", "sampling.eta"),
    teachers: ("algorithm",),
    adapter_lost_on_sleep: (
        "rollout.engine",
        "stack.lora",
        "weight_sync_interval",
        "rollout_resident",
    ),
    train_parking: ("train_resident", "layout", "rollout.engine", "stack.lora", "algorithm.path"),
    trainside_separate: ("layout", "rollout.engine"),
    shared_base: ("rollout", "stack.lora", "num_devices", "backend.mesh"),
    save_from_host: ("save_reads", "num_devices", "backend.mesh"),
    automatic: ("residency", "rollout.engine"),
    overlap: ("overlap_moves", "device_budget_gib", "device"),
    fractions: ("layout", "train_fraction", "reward_fraction"),
    _model_path: ("model.path",),
    _release: ("model.release",),
    _run_directory: ("run_name", "output_dir"),
    _device: ("device", "num_devices"),
    available: ("layout", "reward_fraction"),
}
"""Check -> the keys it reads, in the order of the report."""
