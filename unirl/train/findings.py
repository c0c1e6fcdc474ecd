"""What the numbers of an examination mean: one plain sentence each, and the key to change.

Pure: in go the configuration, what the algorithm needs and `train.examination`'s numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from unirl.algorithms.surrogate import ClipRange
from unirl.config.schema import RunConfig
from unirl.core.capabilities import AlgorithmCapabilities
from unirl.train.examination import Level, Measured, Replay

MUCH = 0.1
"""Part of the clip range that rounding may take."""
WIDE_SPREAD = 10
"""Of gradient norms: the largest over the smallest."""
FAR_ABOVE = 10
"""Gradients should be so many times Adam's epsilon."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    value: str
    is_fine: bool
    sentence: str
    key: str = ""
    """What to change, as it is written in a recipe or an override; empty where nothing is."""

    @property
    def advice(self) -> str:
        """The sentence, and what to set."""
        return f"{self.sentence} Set {self.key}." if self.key else self.sentence


@dataclass(frozen=True)
class Limit:
    """What holds an update back."""

    key: str
    value: float
    """As the key has it, after its schedule."""
    log_ratio: float
    """The size of a log-ratio at which it acts."""


@dataclass(frozen=True)
class Case:
    """Everything that a finding is made of."""

    config: RunConfig
    capabilities: AlgorithmCapabilities
    measured: Measured

    @property
    def limit(self) -> Limit | None:
        """None for algorithms that hold nothing back by a ratio."""
        options, algorithm = self.capabilities.options, self.config.algorithm
        if "clip_range" in options:
            clip = ClipRange.of(algorithm, self.measured.progress).low
            return Limit("clip_range", clip, clip)
        if "kl_mask_threshold" in options:
            threshold = algorithm.kl_mask_threshold
            return Limit("kl_mask_threshold", threshold, math.sqrt(2 * threshold))
        return None

    @property
    def takes_rollout_log_probs(self) -> bool:
        """Whether ratios are taken to the engine's own log-probs."""
        options = self.capabilities.options
        return "old_log_prob" in options and self.config.algorithm.old_log_prob == "rollout"

    @property
    def replays(self) -> list[tuple[Level, Replay]]:
        return [(level, level.replay) for level in self.measured.levels if level.replay]


Check = Callable[[Case], Iterator[Finding]]
"""Gives one finding, or none where there is nothing to look at."""


def findings(
    config: RunConfig, capabilities: AlgorithmCapabilities, measured: Measured
) -> tuple[Finding, ...]:
    """In the order in which one thing explains the next."""
    case = Case(config, capabilities, measured)
    return tuple(finding for check in _CHECKS for finding in check(case))


# --- is training what sampled? ------------------------------------------------------------------


def ratio(case: Case) -> Iterator[Finding]:
    """The ratio before the first update, at full precision."""
    found = case.measured.max_log_ratio
    if not case.measured.levels:
        return
    if found is None:
        name = case.config.algorithm.path
        sentence = f"{name} takes no ratio to an old policy, so nothing has to be 1."
        yield Finding("ratio", "none", True, sentence)
    elif found == 0:
        yield Finding("ratio", "exactly 1", True, _exactly_one(case))
    else:
        yield _other_ratio(case, found)


def _exactly_one(case: Case) -> str:
    updates = case.config.stack.num_updates_per_batch
    if updates == 1:
        return (
            "It must be before the first update, and it stays 1: with num_updates_per_batch=1 each "
            "rollout is trained on once. That trains all the same, by the ratio's gradient."
        )
    return (
        f"It must be before the first update; it moves from the second of the {updates} updates "
        "of a rollout on."
    )


def _other_ratio(case: Case, found: float) -> Finding:
    value, share = f"1 within {found:.1e}", _share(case, found)
    if share is None:
        return Finding("ratio", value, True, "Keep what clips it well above this difference.")
    part = f"{share:.1%} of {_named(case.limit)}"
    if share <= MUCH:
        sentence = f"Engine and trainer differ by rounding: {part}, so 1 in other words."
        return Finding("ratio", value, True, sentence)
    if case.takes_rollout_log_probs:
        return Finding(
            "ratio",
            value,
            False,
            f"Before anything was trained the engine's log-probs are off by {part}: rounding is "
            "clipped as if the policy had moved. Take the trainer's own as the anchor.",
            "algorithm.old_log_prob=replay",
        )
    return Finding(
        "ratio",
        value,
        False,
        f"The same rows in the same batch differ by {part} with gradients and without: the network "
        "does not compute the same both times.",
        "model.precision=fp32",
    )


def replay(case: Case) -> Iterator[Finding]:
    """Log-probs of the engine against those of training, by step."""
    if not case.replays:
        return
    level, worst = max(case.replays, key=lambda one: one[1].max_difference)
    mean = sum(one.mean_difference for _, one in case.replays) / len(case.replays)
    value = f"up to {worst.max_difference:.1e} at step {level.step}, {mean:.1e} on average"
    if worst.max_difference == 0:
        value = "no difference"
    share = _share(case, worst.max_difference)
    if share is None:
        sentence = "Engine's and trainer's log-probs; this loss compares nothing with them."
        yield Finding("rollout against replay", value, True, sentence)
        return
    allowed = MUCH if case.takes_rollout_log_probs else 1.0
    part = f"{share:.1%} of {_named(case.limit)}"
    if share <= allowed:
        exactly = "bit for bit" if share == 0 else f"but for rounding ({part})"
        sentence = f"The engine sampled from the very policy that is trained, {exactly}."
        yield Finding("rollout against replay", value, True, sentence)
    elif case.takes_rollout_log_probs:
        yield Finding(
            "rollout against replay",
            value,
            False,
            f"Engine and trainer differ by {part}, which the ratio takes for a change.",
            "algorithm.old_log_prob=replay",
        )
    else:
        yield Finding(
            "rollout against replay",
            value,
            False,
            f"The engine sampled from another policy than the one that is trained, by {part}: more "
            "than an update may change. Is it rounding, float32 removes it; otherwise weights, "
            "prompts or noise levels differ.",
            "model.precision=fp32",
        )


def batch_shape(case: Case) -> Iterator[Finding]:
    """What a row's log-prob owes to the batch it is computed in."""
    if not case.replays:
        return
    found = max(one.max_alone_difference for _, one in case.replays)
    size = case.config.stack.micro_batch_size
    value = f"{found:.1e} between batches of up to {size} and of 1" if found else "no difference"
    share = _share(case, found)
    if found == 0 or share is None or share <= MUCH:
        sentence = "In which batch a row is computed makes no difference that counts."
        yield Finding("batch shape", value, True, sentence)
    elif case.takes_rollout_log_probs:
        yield Finding(
            "batch shape",
            value,
            False,
            f"The batch alone changes a log-prob by {share:.1%} of {_named(case.limit)}, so "
            "sampling and training in unequal batches look like a change of the policy.",
            "algorithm.old_log_prob=replay",
        )
    else:
        sentence = (
            f"The batch alone changes a log-prob by {share:.1%} of {_named(case.limit)}; it does "
            "not enter the ratio, because old log-probs are replayed in the batches of the update."
        )
        yield Finding("batch shape", value, True, sentence)


def _share(case: Case, log_ratio: float) -> float | None:
    return None if case.limit is None else log_ratio / case.limit.log_ratio


def _named(limit: Limit | None) -> str:
    """`clip_range=0.001`, or what a threshold means for a log-ratio."""
    if limit is None:
        return ""
    named = f"{limit.key}={limit.value:.3g}"
    if limit.value == limit.log_ratio:
        return named
    return f"the log-ratio {limit.log_ratio:.1e} at {named}"


# --- what was sampled ---------------------------------------------------------------------------


def schedule(case: Case) -> Iterator[Finding]:
    """The noise levels; an engine that used others was refused before."""
    sigmas = case.measured.sampled.sigmas
    named = [f"{sigma:.4g}" for sigma in sigmas]
    value = ", ".join(named if len(named) <= 6 else [*named[:3], "...", *named[-2:]])
    shift, found = case.config.sampling.shift, static_shift(sigmas)
    asked = "the model's own" if shift is None else f"with sampling.shift={shift:g}"
    known = "" if found is None else f", as a static shift of {found:.4g} makes them"
    sentence = f"The engine stepped through these levels, {asked}{known}."
    yield Finding("noise levels", value, True, sentence)


def static_shift(sigmas: tuple[float, ...]) -> float | None:
    """The shift that makes these T+1 levels of linear ones (arXiv:2403.03206, eq. 23), if one
    does."""
    num_steps = len(sigmas) - 1
    shifts = []
    for step, sigma in enumerate(sigmas[1:-1], start=1):
        linear = 1 - step / num_steps
        shifts.append(sigma * (1 - linear) / (linear * (1 - sigma)))
    if not shifts or max(shifts) > 1.001 * min(shifts):
        return None
    return shifts[0]


def window(case: Case) -> Iterator[Finding]:
    """Which steps were stochastic; an engine that made others was refused before."""
    sampled = case.measured.sampled
    steps, num_steps = sampled.samples_by_step, len(sampled.sigmas) - 1
    if not steps:
        sentence = f"{case.config.algorithm.path} needs none."
        yield Finding("stochastic steps", "none", True, sentence)
        return
    fewest, most = min(steps.values()), max(steps.values())
    each = f"{most}" if fewest == most else f"{fewest} to {most}"
    yield Finding(
        "stochastic steps",
        f"{_runs(list(steps))} of 0 to {num_steps - 1}, by {each} of {sampled.num_samples} samples",
        True,
        "The engine made the steps it was asked for, and they are what is trained on.",
    )


def _runs(steps: Sequence[int]) -> str:
    """Ascending steps in short: `0 to 4, 7`."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)


def equal_groups(case: Case) -> Iterator[Finding]:
    """Groups whose samples all got the same reward."""
    if not case.capabilities.needs_advantages:
        return
    sampled = case.measured.sampled
    equal, total = sampled.num_equal_groups, sampled.num_groups
    value = f"{equal} of {total} groups"
    if equal <= total / 2:
        sentence = "Samples of a group get different rewards, so there is something to compare."
        yield Finding("equal rewards", value, True, sentence)
    else:
        yield Finding(
            "equal rewards",
            value,
            False,
            "In most groups all samples get the same reward and teach nothing: take more samples, "
            "more noise, or a reward that tells them apart.",
            "sampling.samples_per_prompt, sampling.eta, reward.scorers",
        )


# --- what is learned from it --------------------------------------------------------------------


def gradient_size(case: Case) -> Iterator[Finding]:
    """What Adam divides by, against what it adds to that."""
    if not case.measured.levels:
        yield Finding(
            "gradient",
            "none",
            False,
            "There is no row to train on: in every group samples failed or are equal.",
            "reward.scorers",
        )
        return
    gradients, stack = case.measured.gradients, case.config.stack
    epsilon = stack.optimizer.adam_epsilon
    clipped = min(1.0, stack.max_grad_norm / gradients.norm) if gradients.norm else 1.0
    rms = gradients.rms * clipped
    value = f"RMS {rms:.1e}, Adam's epsilon {epsilon:.0e}"
    if not math.isfinite(gradients.norm):
        yield Finding(
            "gradient",
            f"{gradients.norm}",
            False,
            "The gradient is not finite, and such steps are skipped.",
            "model.precision=fp32",
        )
    elif rms == 0:
        yield _no_gradient(case)
    elif rms < FAR_ABOVE * epsilon:
        lower = 10.0 ** (math.floor(math.log10(rms)) - 2)
        yield Finding(
            "gradient",
            value,
            False,
            "Gradients are not far above Adam's epsilon, which then sets the size of a step: small "
            "gradients hardly move a weight.",
            f"stack.optimizer.adam_epsilon={lower:.0e}",
        )
    else:
        sentence = f"Gradients are {rms / epsilon:.2g} times epsilon, so that it does not matter."
        yield Finding("gradient", value, True, sentence)


def _no_gradient(case: Case) -> Finding:
    sampled, needs = case.measured.sampled, case.capabilities
    if needs.needs_advantages and sampled.num_equal_groups == sampled.num_groups:
        reason, key = "all rewards of every group are equal", "reward.scorers"
    elif needs.needs_advantages:
        reason, key = "nothing that is trained changes the loss", "stack.lora.target_modules"
    elif needs.differentiates_reward:
        reason, key = "no reward can rise further", "reward.scorers, algorithm.reward_cap"
    else:
        reason, key = "the loss is at its least already", "algorithm.teachers"
    return Finding("gradient", "0", False, f"The gradient is exactly 0: {reason}.", key)


def silent_tensors(case: Case) -> Iterator[Finding]:
    """Trained tensors that get no gradient."""
    gradients = case.measured.gradients
    if gradients.norm == 0:
        return
    waiting = (
        f"{gradients.num_waiting} matrices A of the adapter get theirs once B is not 0, "
        "after the first update."
        if gradients.num_waiting
        else ""
    )
    if not gradients.silent:
        sentence = waiting or "Everything that is trained gets a gradient."
        yield Finding("tensors without gradient", "none", True, sentence)
        return
    some = ", ".join(gradients.silent[:3])
    more = f" and {len(gradients.silent) - 3} more" if len(gradients.silent) > 3 else ""
    value = f"{len(gradients.silent)}: {some}{more}"
    if case.config.stack.lora is None:
        sentence = "The loss does not depend on these weights; they only cost memory."
        yield Finding("tensors without gradient", value, True, sentence)
    else:
        yield Finding(
            "tensors without gradient",
            value,
            False,
            f"The loss does not depend on these parts of the adapter: name other layers. {waiting}",
            "stack.lora.target_modules",
        )


def gradient_by_step(case: Case) -> Iterator[Finding]:
    """Whether some steps drown the others."""
    levels = case.measured.levels
    norm = case.measured.gradients.norm
    if len(levels) < 2 or norm == 0 or not math.isfinite(norm):
        return
    loudest = max(levels, key=lambda level: level.gradient_norm)
    quietest = min(levels, key=lambda level: level.gradient_norm)
    small, large = quietest.gradient_norm, loudest.gradient_norm
    spread = large / small if small else math.inf
    value = f"{small:.1e} at {_place(quietest)} to {large:.1e} at {_place(loudest)}: {spread:.2g}x"
    if spread <= WIDE_SPREAD:
        yield Finding("gradient by step", value, True, "All of these take part in the learning.")
    elif not case.replays:
        sentence = "Noise levels weigh as this loss has it; one of them sets most of the gradient."
        yield Finding("gradient by step", value, True, sentence)
    else:
        yield Finding(
            "gradient by step",
            value,
            False,
            f"{_place(quietest).capitalize()} hardly takes part: how much a log-prob depends on "
            "the velocity differs by step. Weigh steps, or train on those that are alike.",
            _step_weights(case.config.algorithm.path),
        )


def _step_weights(present: str) -> str:
    others = [n for n in ("flash_grpo", "tempflow_grpo", "grpo_guard") if n != present]
    return f"algorithm.path={' or '.join(others)}, or sampling.sde_steps.range"


def _place(level: Level) -> str:
    if level.step is not None:
        return f"step {level.step}"
    return "all rows" if level.sigma is None else f"level {level.sigma:.2g}"


def trust_region(case: Case) -> Iterator[Finding]:
    """How far an update may move the mean of a step, in units of the step's std."""
    limit = case.limit
    if limit is None or not case.replays:
        return
    stds = [one.std for _, one in case.replays]
    spread = f"a step's std is {_range(min(stds), max(stds))}"
    elements = case.measured.latent_elements
    name = limit.key.replace("_", " ")
    if limit.key == "kl_mask_threshold":
        yield Finding(
            name,
            f"{limit.value:.2g} is {limit.log_ratio:.1e} std in any direction",
            True,
            f"So far may the mean of a step move; {spread}.",
        )
    elif "old_log_prob" not in case.capabilities.options:  # ratios normalised by the step's std
        along = _range(limit.value / max(stds), limit.value / min(stds))
        yield Finding(
            name,
            f"{limit.value:.2g} is {along} std along the noise",
            True,
            f"So far may the mean of a step move towards the noise that was drawn, and "
            f"{math.sqrt(elements):.0f} times as far across it; {spread}.",
        )
    else:
        across = distance_across(limit.value, elements)
        yield Finding(
            name,
            f"{limit.value:.2g} is {limit.value:.1e} std along the noise, {across:.1e} across it",
            True,
            f"So far may the mean of a step of {elements} elements move before the ratio is "
            f"clipped: towards the noise that was drawn, or in an unrelated direction; {spread}.",
        )


def distance_across(clip_range: float, elements: int) -> float:
    """By how many stds the mean may move in a direction unrelated to the noise.

    A shift of d std changes the mean log-density by d z - d^2 / 2, where z is the noise's part in
    that direction: 1 / sqrt(D) by chance. So d is sqrt(D) clip_range, as long as the second term,
    which lowers every ratio, is not larger: then it is sqrt(2 clip_range).
    """
    return min(math.sqrt(elements) * clip_range, math.sqrt(2 * clip_range))


def _range(low: float, high: float) -> str:
    low_text, high_text = f"{low:.2g}", f"{high:.2g}"
    return low_text if low_text == high_text else f"{low_text} to {high_text}"


_CHECKS: tuple[Check, ...] = (
    ratio,
    replay,
    batch_shape,
    schedule,
    window,
    equal_groups,
    gradient_size,
    silent_tensors,
    gradient_by_step,
    trust_region,
)
