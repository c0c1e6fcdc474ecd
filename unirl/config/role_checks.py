"""What cannot be asked of the train stack, the rollout engine and the sync between them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from unirl.config import catalog
from unirl.config.components import (
    algorithm_capabilities,
    engine_capabilities,
    is_own,
    sync_capabilities,
)
from unirl.config.problem import Problem
from unirl.config.resources import weights_file
from unirl.config.schema import RunConfig


def old_log_prob(config: RunConfig) -> Iterator[Problem]:
    asked = config.algorithm.old_log_prob == "rollout"
    if asked and not engine_capabilities(config).emits_log_probs:
        yield Problem(
            "algorithm.old_log_prob",
            f"is 'rollout', but rollout.engine={config.rollout.engine} returns no log-probs. "
            "Set algorithm.old_log_prob=replay.",
        )


def recorded_steps(config: RunConfig) -> Iterator[Problem]:
    """Recorded images come without the denoising steps that some algorithms train on."""
    if not engine_capabilities(config).returns_recorded:
        return
    needs = algorithm_capabilities(config)
    found = f"rollout.engine={config.rollout.engine} returns recorded images"
    if needs.needs_stochastic_steps or needs.differentiates_reward:
        yield Problem(
            "algorithm.path",
            f"is {config.algorithm.path!r}, which trains on denoising steps, but {found}. Set "
            "algorithm.path=diffusion_dpo, or rollout.engine=trainside.",
        )
    elif config.sampling.eta > 0:
        yield Problem(
            "sampling.eta",
            f"is {config.sampling.eta:g}, but {found}, without stochastic steps. Set it to 0.",
        )


def adapter_lost_on_sleep(config: RunConfig) -> Iterator[Problem]:
    sync = sync_capabilities(config)
    if (
        sync is not None
        and sync.adapters_only
        and not engine_capabilities(config).keeps_adapter_on_sleep
        and config.weight_sync_interval > 1
        and not config.resident["rollout"]
    ):
        yield Problem(
            "weight_sync_interval",
            f"is {config.weight_sync_interval}, but rollout.engine={config.rollout.engine} loses "
            "its adapter when it is parked, after every rollout. Set weight_sync_interval=1 or "
            "rollout_resident=true.",
        )


def train_parking(config: RunConfig) -> Iterator[Problem]:
    """The first reason why the train stack cannot be parked; later ones would mislead."""
    if config.train_resident is not False:
        return
    key, fix = "train_resident", "Set train_resident=true"
    sync = sync_capabilities(config)
    if config.layout == "separate":
        found = "layout=separate gives the train stack devices of its own: nothing to park it for"
        yield Problem(key, f"is false, but {found}. {fix}.")
    elif sync is None:
        found = f"rollout.engine={config.rollout.engine} samples with the train stack's own weights"
        yield Problem(
            key, f"is false, but {found}: nothing to park. {fix}, or rollout.engine=replica."
        )
    elif not sync.staged:
        found = "the weight sync of full weights reads the trainer while it loads the engine"
        yield Problem(key, f"is false, but {found}. {fix}, or train an adapter: stack.lora={{}}.")
    elif algorithm_capabilities(config).needs_ema_rollout:
        found = f"algorithm.path={config.algorithm.path} samples with an EMA the train stack holds"
        yield Problem(key, f"is false, but {found}. {fix}.")


def trainside_separate(config: RunConfig) -> Iterator[Problem]:
    if config.layout == "separate" and engine_capabilities(config).shares_train_weights:
        yield Problem(
            "layout",
            f"is 'separate', but rollout.engine={config.rollout.engine} samples with the train "
            "stack's own weights, on its devices. Set layout=colocate.",
        )


def fractions(config: RunConfig) -> Iterator[Problem]:
    train, reward = config.train_fraction, config.reward_fraction
    if not 0 <= reward < 1:
        yield Problem("reward_fraction", f"is {reward:g}; it must be at least 0 and below 1.")
    elif config.layout == "separate" and not 0 < train < 1:
        yield Problem("train_fraction", f"is {train:g}; it must lie between 0 and 1.")
    elif config.layout == "separate" and train + reward >= 1:
        yield Problem(
            "train_fraction",
            f"{train:g} + reward_fraction {reward:g} = {train + reward:g} leaves no devices for "
            "rollouts. Lower one, so that the sum is below 1.",
        )


def available(config: RunConfig) -> Iterator[Problem]:
    only = "not available in this version, where all roles share each device."
    if config.layout == "separate":
        yield Problem("layout", f"is 'separate': {only} Set layout=colocate.")
    if config.reward_fraction > 0:
        yield Problem(
            "reward_fraction", f"is {config.reward_fraction:g}: {only} Set reward_fraction=0."
        )


def differentiated_reward(config: RunConfig) -> Iterator[Problem]:
    """Gradients through scorers need scorers, on the device while training."""
    if not algorithm_capabilities(config).differentiates_reward:
        return
    takes = f"algorithm.path={config.algorithm.path} takes the gradient of the reward"
    if config.reward is None or not config.reward.scorers:
        yield Problem(
            "reward",
            f"has no scorers, but {takes}. Set reward.scorers to scorers that can be "
            "differentiated, e.g. reward=ocr_ctc_color.",
        )
    for name, scorer in (config.reward.scorers if config.reward else {}).items():
        if not is_own(scorer.path) and not catalog.SCORERS[scorer.path].differentiable:
            yield Problem(
                f"reward.scorers.{name}",
                f"is {scorer.path}, which cannot be differentiated, but {takes}. Remove it, or "
                "move it to eval_rewards.",
            )
    if not config.resident["reward"]:
        found = f"is false, but {takes}, so its networks work while training"
        yield Problem("reward_resident", f"{found}. Set reward_resident=true.")
    elif config.residency == "auto" and config.reward_resident is None:
        found = f"is null, so residency=auto may park the reward while training, but {takes}"
        yield Problem("reward_resident", f"{found}. Set reward_resident=true.")


def differentiated_steps(config: RunConfig) -> Iterator[Problem]:
    """DRaFT makes a rollout's last steps again, ReFL predicts the end from one of its steps."""
    algorithm, sampling = config.algorithm, config.sampling
    if algorithm.path not in ("draft", "refl"):
        return
    total = sampling.num_inference_steps
    if sampling.eta > 0:
        yield Problem(
            "sampling.eta",
            f"is {sampling.eta:g}, but algorithm.path={algorithm.path} differentiates steps "
            "without noise. Set sampling.eta=0.",
        )
    if algorithm.path == "refl":
        if not algorithm.start_steps(total):
            yield Problem(
                "algorithm.start_range",
                f"is {algorithm.start_range}, but of {total} steps this selects none. It needs "
                "0 <= start < end <= 1; widen it, or raise sampling.num_inference_steps.",
            )
        return
    if algorithm.last_steps > total:
        yield Problem(
            "algorithm.last_steps",
            f"is {algorithm.last_steps}, but sampling.num_inference_steps is {total}. "
            f"Set it to {total} or less.",
        )
    if sampling.solver != "euler":
        yield Problem(
            "sampling.solver",
            f"is {sampling.solver}, but algorithm.path=draft makes the last steps again, and a "
            "step of this solver depends on those before. Set sampling.solver=euler.",
        )
    if algorithm.random_last_steps and config.accumulate_rollouts > 1:
        yield Problem(
            "accumulate_rollouts",
            f"is {config.accumulate_rollouts}, but with algorithm.random_last_steps=true each "
            "rollout has its own number of steps, and an update one. Set accumulate_rollouts=1 "
            "and a larger batch_size.",
        )


def teachers(config: RunConfig) -> Iterator[Problem]:
    """Distillation needs files of teachers, which are read when the train stack is built."""
    algorithm = config.algorithm
    if algorithm.path != "distillation":
        return
    if not algorithm.teachers:
        yield Problem(
            "algorithm.teachers",
            "is empty, but distillation learns from one or more. Set e.g. "
            "algorithm.teachers.default=runs/<run>/checkpoints/checkpoint-<n>.",
        )
    for domain, path in algorithm.teachers.items():
        key = f"algorithm.teachers.{domain}"
        if not re.fullmatch(r"\w+", domain):
            yield Problem(
                key, f"{domain!r} becomes part of metric names: use letters, digits and _."
            )
        file = weights_file(path)
        if not file.is_file():
            yield Problem(key, f"is {path!r}, but there is no file {file}. Correct the path.")


def distinct_samples(config: RunConfig) -> Iterator[Problem]:
    """Without noise in the steps, equal starts are equal images."""
    sampling = config.sampling
    if algorithm_capabilities(config).needs_stochastic_steps:
        return  # sampling.eta=0 itself is refused
    if sampling.eta == 0 and sampling.num_samples_per_start > 1:
        key = "init_same_noise" if sampling.samples_per_start is None else "samples_per_start"
        yield Problem(
            f"sampling.{key}",
            f"gives {sampling.num_samples_per_start} samples one start noise, but sampling.eta=0 "
            "leaves nothing else that tells them apart. "
            "Set sampling.init_same_noise=false and sampling.samples_per_start=null.",
        )
