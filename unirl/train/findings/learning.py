"""What is learned from the samples: the gradient's size, where it comes from, how far it may go."""

from __future__ import annotations

import math
from collections.abc import Iterator

from unirl.train.examination import Level
from unirl.train.findings.case import Case, Finding

WIDE_SPREAD = 10
"""Of gradient norms: the largest over the smallest."""
FAR_ABOVE = 10
"""Gradients should be so many times Adam's epsilon."""


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
