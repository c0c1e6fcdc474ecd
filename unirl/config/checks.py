"""What can be wrong with a configuration although each key is right by itself.

Pure except for looking at files and importing the user's own classes. Each check yields problems
and lists the keys it reads: where one of these is wrong already, its verdict would mislead.
"""

from __future__ import annotations

import inspect
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
from unirl.config.model_checks import (
    adapter,
    blocks,
    dora,
    encodings,
    gathering,
    generic_pipeline,
    model_folder,
    model_path,
    quantization,
    release,
    unshard,
)
from unirl.config.problem import Problem
from unirl.config.residency_checks import automatic, overlap, save_from_host, shared_base
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
from unirl.config.training_checks import accumulated, group_size, schedule, updates
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


# Surroundings


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
    group_size: ("sampling.samples_per_prompt", "algorithm.path"),
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
    blocks: ("backend.block_classes", "model.family", "num_devices", "backend"),
    encodings: ("model.encodings", "model.family", "rollout.engine"),
    model_folder: ("model.path", "model.family"),
    generic_pipeline: ("model.family", "rollout.engine"),
    quantization: (
        *("model.quantization", "model.family", "stack.lora", "num_devices", "backend.mesh"),
        "save_mode",
    ),
    dora: ("stack.lora.use_dora", "num_devices", "backend.mesh"),
    gathering: ("backend.gather_dtype", "backend.mesh", "model.precision", "rollout.unshard"),
    unshard: ("rollout.unshard", "rollout.engine"),
    updates: ("stack.num_updates_per_batch", "algorithm.path"),
    accumulated: (
        "accumulate_rollouts",
        "stack.num_updates_per_batch",
        "algorithm.path",
        "eval_interval",
        "save_interval",
        "num_rollouts",
    ),
    schedule: ("stack.scheduler",),
    adapter: ("stack.lora", "model.family", "algorithm", "save_mode"),
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
    model_path: ("model.path",),
    release: ("model.release",),
    _run_directory: ("run_name", "output_dir"),
    _device: ("device", "num_devices"),
    available: ("layout", "reward_fraction"),
}
"""Check -> the keys it reads, in the order of the report."""
