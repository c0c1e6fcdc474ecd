"""Sizes that must fit: samples, updates, devices, steps and their noise, pixels and the model."""

from __future__ import annotations

from collections.abc import Iterator

from unirl.config import catalog
from unirl.config.components import algorithm_capabilities
from unirl.config.model_files import value_in_files
from unirl.config.problem import Problem
from unirl.config.schema import ModelConfig, RunConfig, SamplingConfig
from unirl.config.step_selection import selection_problems


def batch_geometry(config: RunConfig) -> Iterator[Problem]:
    """The samples of an optimizer window must split into equal updates."""
    prompts, group = config.batch_size, config.sampling.samples_per_prompt
    window, updates = config.accumulate_rollouts, config.stack.num_updates_per_batch
    samples = prompts * group * window
    if samples % updates == 0:
        return
    near = " or ".join(str(number) for number in _nearest_divisors(samples, updates))
    yield Problem(
        "stack.num_updates_per_batch",
        f"batch_size {prompts} x sampling.samples_per_prompt {group} x accumulate_rollouts {window}"
        f" = {samples} samples; / stack.num_updates_per_batch {updates} = {samples / updates:.2f} "
        f"samples per update, which is not a whole number. "
        f"Set stack.num_updates_per_batch to {near}, or change batch_size.",
    )


def device_geometry(config: RunConfig) -> Iterator[Problem]:
    """Whole prompt groups on each device, whole shard groups on all of them."""
    devices, prompts = config.num_devices, config.batch_size
    if prompts % devices:
        fitting = " or ".join(str(number) for number in _nearest_divisors(prompts, devices))
        above = -(-prompts // devices) * devices
        yield Problem(
            "num_devices",
            f"batch_size {prompts} / num_devices {devices} = {prompts / devices:.2f} prompts per "
            "device, which is not a whole number; the samples of a prompt stay on one device. "
            f"Set batch_size={above}, or num_devices to {fitting}.",
        )
    mesh, size = config.backend.mesh, config.backend.shard_size
    if mesh == "hybrid" and size is None:
        yield Problem(
            "backend.shard_size",
            "is null, but backend.mesh=hybrid needs the number of devices in a shard group: "
            "usually those of one node.",
        )
    elif mesh == "hybrid" and size is not None and devices % size:
        yield Problem(
            "backend.shard_size",
            f"num_devices {devices} / backend.shard_size {size} = {devices / size:.2f} shard "
            "groups, which is not a whole number.",
        )
    elif mesh != "hybrid" and size is not None:
        yield Problem(
            "backend.shard_size",
            f"is {size}, but backend.mesh={mesh} has no shard groups. Set it to null, or "
            "backend.mesh=hybrid.",
        )


def _nearest_divisors(number: int, near: int) -> list[int]:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < near][-1:]
    return below + [d for d in divisors if d > near][:1]


def stochastic_steps(config: RunConfig) -> Iterator[Problem]:
    """Training needs recorded steps with noise; evaluation may add noise on the same steps only."""
    needed = algorithm_capabilities(config).needs_stochastic_steps
    sampling = config.sampling
    yield from _noise_level(config, needed)
    yield from _starts(sampling)
    if sampling.eta > 0 or config.eval_eta > 0:
        yield from selection_problems(sampling.sde_steps, sampling.num_inference_steps)
    training = sampling.num_inference_steps
    evaluation = config.eval_sampling.num_inference_steps
    if config.eval_eta > 0 and evaluation not in (None, training):
        yield Problem(
            "eval_eta",
            f"is {config.eval_eta:g}, but the stochastic steps are chosen for "
            f"sampling.num_inference_steps={training} and eval_sampling.num_inference_steps is "
            f"{evaluation}. Set eval_eta=0 or eval_sampling.num_inference_steps=null.",
        )


def _noise_level(config: RunConfig, needed: bool) -> Iterator[Problem]:
    if needed and config.sampling.eta == 0:
        yield Problem(
            "sampling.eta",
            f"is 0, but algorithm.path={config.algorithm.path} trains on stochastic steps and "
            "without noise there is no log-prob. Set it above 0, e.g. sampling.eta=0.7.",
        )
    eval_kernel = config.eval_sampling.kernel or config.sampling.kernel
    levels = {
        "sampling.eta": (config.sampling.eta, config.sampling.kernel),
        "eval_eta": (config.eval_eta, eval_kernel),
    }
    for key, (eta, kernel) in levels.items():
        if kernel in _LARGEST_AMOUNT and eta > 1:
            yield Problem(
                key,
                f"is {eta:g}, but with kernel {kernel} {_LARGEST_AMOUNT[kernel]}, "
                "so eta ends at 1.",
            )


_LARGEST_AMOUNT = {
    "cps": "the noise is sin(eta pi/2) of its largest amount",
    "ddim": "all noise of a step is fresh at eta=1, as in DDPM",
}


def _starts(sampling: SamplingConfig) -> Iterator[Problem]:
    per_start, group = sampling.samples_per_start, sampling.samples_per_prompt
    if per_start is not None and group % per_start:
        near = " or ".join(str(number) for number in _nearest_divisors(group, per_start))
        yield Problem(
            "sampling.samples_per_start",
            f"sampling.samples_per_prompt {group} / sampling.samples_per_start {per_start} = "
            f"{group / per_start:.2f} starts, which is not a whole number. Set it to {near}.",
        )


def prompt_length(config: RunConfig) -> Iterator[Problem]:
    """Tokens of a prompt that the family reads and the model's files allow."""
    entry, length = catalog.MODELS.get(config.model.family), config.model.max_sequence_length
    if entry is None:
        return  # the user's own family: only it knows
    default = ModelConfig().max_sequence_length
    if not entry.takes_length and length != default:
        yield Problem(
            "model.max_sequence_length",
            f"is {length}, but model.family={config.model.family} has a length of its own and does "
            f"not read it. Set it to {default}.",
        )
    if entry.length_multiple is None:
        return
    file, key = entry.length_multiple.file, entry.length_multiple.key
    multiple = value_in_files(config.model, file, key)
    if isinstance(multiple, int) and length % multiple:
        below = length // multiple * multiple
        near = f"{below} or {below + multiple}" if below else f"{multiple}"
        yield Problem(
            "model.max_sequence_length",
            f"is {length}, but this model needs a multiple of {multiple} ({key} in its {file}). "
            f"Set it to {near}.",
        )


def image_size(config: RunConfig) -> Iterator[Problem]:
    """Height and width the model can make, in training and at evaluation."""
    if config.model.family not in catalog.MODELS:
        return  # the user's own family: only it knows
    training = (config.sampling.height, config.sampling.width)
    evaluation = (
        config.eval_sampling.height or config.sampling.height,
        config.eval_sampling.width or config.sampling.width,
    )
    yield from _size("sampling", training, config.model.family)
    if evaluation != training:
        yield from _size("eval_sampling", evaluation, config.model.family)


def _size(block: str, size: tuple[int, int], family: str) -> Iterator[Problem]:
    model = catalog.MODELS[family]
    if model.fixed_size is not None:
        height, width = model.fixed_size
        if size != model.fixed_size:
            yield Problem(
                f"{block}.height",
                f"height x width is {size[0]} x {size[1]}, but model.family={family} makes "
                f"{height} x {width} only. Set {block}.height={height} {block}.width={width}.",
            )
        return
    multiple = model.size_multiple
    for key, value in (("height", size[0]), ("width", size[1])):
        if value % multiple:
            below = value // multiple * multiple
            near = f"{below} or {below + multiple}" if below else f"{multiple}"
            yield Problem(
                f"{block}.{key}",
                f"is {value}, but model.family={family} needs a multiple of {multiple}. "
                f"Set {block}.{key} to {near}.",
            )
