"""Is what trains the policy that sampled?"""

from __future__ import annotations

from collections.abc import Iterator

from unirl.train.findings.case import Case, Finding, Limit

MUCH = 0.1
"""Part of the clip range that rounding may take."""
NO_ROUNDING = 0.25
"""Relative error of a layer; rounding to bfloat16 makes 0.004, a broken kernel about 1."""


def layers(case: Case) -> Iterator[Finding]:
    """Whether layers compute in the run's precision what they do in float32."""
    worst, precision = case.measured.worst_layer, case.config.model.precision
    if worst is None or precision == "fp32":
        return
    value = f"{precision} is up to {worst.error:.1%} off float32, in {worst.name}"
    if worst.error <= NO_ROUNDING:
        yield Finding("layers", value, True, "Each with the inputs that it has: rounding.")
        return
    yield Finding(
        "layers",
        value,
        False,
        f"That is no rounding: what this processor and its libraries compute for this "
        f"{worst.kind} is wrong, alike in sampling and training, so that no ratio shows it.",
        "model.precision=fp32",
    )


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
