"""What was sampled: noise levels, stochastic steps, rewards that differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unirl.train.findings.case import Case, Finding


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
