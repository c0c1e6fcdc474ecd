"""`unirl check`: every problem of a recipe at once, or a summary of what the run would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from unirl.checkpoint.finding import find_checkpoint
from unirl.checkpoint.source import checkpoint_directory, find_source
from unirl.checkpoint.store import CheckpointStore
from unirl.cli.compose import compose_and_check
from unirl.config.components import absent_packages, engine_capabilities, sync_name
from unirl.config.problem import Problem, config_error
from unirl.config.resources import resolve_path
from unirl.config.schema import AUTO, RunConfig
from unirl.config.suites import AskedSuite, asked_suites
from unirl.core.errors import CheckpointError, DataError
from unirl.core.types import MAIN_SUITE
from unirl.data.prompts import load_prompts


def checked(recipe: str, overrides: Sequence[str], config_dir: Path | None) -> RunConfig:
    """The configuration; raises ConfigError listing every problem, those of its files included."""
    config, problems = compose_and_check(recipe, overrides, config_dir)
    bad_keys = {problem.key for problem in problems}
    problems.extend(p for p in _file_problems(config) if p.key not in bad_keys)
    if problems:
        raise config_error(recipe, problems)
    return config


def checked_but_for_files(
    recipe: str, overrides: Sequence[str], config_dir: Path | None
) -> RunConfig:
    """The same without a look at prompt files and checkpoints, which rank 0 takes for all."""
    config, problems = compose_and_check(recipe, overrides, config_dir)
    if problems:
        raise config_error(recipe, problems)
    return config


def _file_problems(config: RunConfig) -> Iterator[Problem]:
    yield from _prompt_problems(config.data.train, "data.train", "batch_size", config.batch_size)
    yield from suite_problems(config)
    if config.load_dir is not None:
        try:
            find_source(config)
        except CheckpointError as error:
            yield Problem("load_dir", str(error))
    if config.start_from is not None:
        try:
            find_checkpoint(Path(config.start_from).expanduser(), "start_from")
        except CheckpointError as error:
            yield Problem("start_from", str(error))


def suite_problems(config: RunConfig) -> Iterator[Problem]:
    """Of the prompt files that are evaluated: unreadable, or with fewer prompts than asked."""
    for suite in asked_suites(config):
        yield from _prompt_problems(suite.path, suite.key, suite.count_key, suite.num_prompts or 1)


def _prompt_problems(path: str, key: str, count_key: str, count: int) -> Iterator[Problem]:
    try:
        available = len(load_prompts(resolve_path(path), key))
    except DataError as error:
        yield Problem(key, str(error))
        return
    if count > available:
        yield Problem(
            count_key,
            f"is {count}, but {key}={path} has only {available} prompts. "
            f"Set {count_key} to {available} or less, or give more prompts.",
        )


def summary(recipe: str, config: RunConfig) -> str:
    """What the run would do, in a few aligned lines."""
    rows = {
        "rollout": _rollout(config),
        "training": _training(config),
        "run": _run(config),
        "devices": _devices(config),
        "left out": _left_out(config),
        "sync": _sync(config),
        "residency": _residency(config),
        "begins": _begins(config),
        "writes": str(Path(config.output_dir) / config.run_name),
    }
    lines = [f"  {name:10} {text}" for name, text in rows.items() if text]
    return "\n".join([f"{recipe}: no problems", *lines])


def _rollout(config: RunConfig) -> str:
    sampling = config.sampling
    images = config.batch_size * sampling.samples_per_prompt
    return (
        f"{config.batch_size} prompts x {sampling.samples_per_prompt} samples = {images} images "
        f"({sampling.width} x {sampling.height} px, {sampling.num_inference_steps} steps, "
        f"guidance {sampling.guidance_scale:g})"
    )


def _training(config: RunConfig) -> str:
    updates, lora = config.stack.num_updates_per_batch, config.stack.lora
    weights = "all weights" if lora is None else f"LoRA of rank {lora.rank}"
    return (
        f"{config.algorithm.path} on {weights}; {_stochastic_steps(config)}; "
        f"{plural(updates, 'update')} per {_each(config.accumulate_rollouts)}"
    )


def _stochastic_steps(config: RunConfig) -> str:
    sampling, sde = config.sampling, config.sampling.sde_steps
    if sampling.eta == 0:
        return f"no stochastic steps ({sampling.solver})"
    steps = sde.steps or sde.candidates(sampling.num_inference_steps)
    match sde.strategy:
        case "all" | "list":
            chosen = "steps"
        case "stratified":
            chosen = "one per sample of steps"
        case _:
            chosen = f"{sde.num_steps} ({sde.strategy}) of steps"
    numbers = ", ".join(map(str, steps))
    return f"stochastic ({sampling.kernel}, eta {sampling.eta:g}): {chosen} {numbers}"


def _run(config: RunConfig) -> str:
    windows = config.num_rollouts // config.accumulate_rollouts
    parts = [
        f"{plural(config.num_rollouts, 'rollout')}, "
        f"{plural(windows * config.stack.num_updates_per_batch, 'optimizer step')}"
    ]
    if config.eval_interval:
        parts.append(
            f"evaluated before and every {_each(config.eval_interval)} "
            f"({' and '.join(_suite(suite) for suite in asked_suites(config))})"
        )
    if config.save_interval:
        parts.append(f"saved every {_each(config.save_interval)}")
    return "; ".join(parts)


def _suite(suite: AskedSuite) -> str:
    prompts = "all" if suite.num_prompts is None else suite.num_prompts
    name = "" if suite.name == MAIN_SUITE else f" of {suite.name}"
    return f"{prompts} prompts{name} x {suite.samples_per_prompt}"


def _begins(config: RunConfig) -> str:
    """Without reading checkpoints again, which may be large."""
    resumes = config.load_dir is not None
    if config.load_dir == AUTO:
        resumes = bool(CheckpointStore(checkpoint_directory(config)).steps())
    if resumes:
        return f"where it ended: load_dir={config.load_dir}"
    return "" if config.start_from is None else f"with the weights of {config.start_from}"


def _devices(config: RunConfig) -> str:
    if config.num_devices == 1:
        return ""
    meshes = {
        "full": f"weights in shards over all {config.num_devices}",
        "hybrid": f"weights in shards over groups of {config.backend.shard_size}",
        "no_shard": "a copy of the weights on each",
    }
    prompts = plural(config.batch_size // config.num_devices, "prompt")
    return f"{config.num_devices} ranks; {prompts} each; {meshes[config.backend.mesh]}"


def _sync(config: RunConfig) -> str:
    name = sync_name(config)
    if name is None:
        return "none: samples with the trained weights"
    what = "adapter" if name == "lora" else "all weights"
    return f"{what} to the rollout engine every {_each(config.weight_sync_interval)}"


def _residency(config: RunConfig) -> str:
    words = {True: "stays on the device", False: "is parked while idle"}
    roles = config.resident
    if engine_capabilities(config).shares_train_weights:
        roles = {"train": True, "reward": roles["reward"]}
    if config.residency == "auto":
        return "searched when the run starts; `unirl plan` shows it"
    return ", ".join(f"{role} {words[stays]}" for role, stays in roles.items())


def _left_out(config: RunConfig) -> str:
    """Optional judges whose packages are not installed."""
    absent = {
        name: packages
        for name, scorer in config.eval_rewards.items()
        if scorer.optional and (packages := absent_packages(scorer.path))
    }
    return ", ".join(f"eval_rewards.{n} (needs {' and '.join(p)})" for n, p in absent.items())


def _each(num_rollouts: int) -> str:
    return "rollout" if num_rollouts == 1 else f"{num_rollouts} rollouts"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
