"""A look at scored rollouts before they are trained on: what is exact, how large, how alike.

In go the rollouts of a window and the policy in training, out come numbers; `train.findings` says
what they mean. The algorithm's own rows, anchor and loss are used, on one micro-batch for each step
(or noise level). Gradients are dropped again, and neither weights, optimizer nor random state are
touched, so that a run is the same with it and without it. One process only: ranks would have to
make equally many forwards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unirl.algorithms.base import Algorithm, Policy, Rows
from unirl.algorithms.diffusion_dpo import PairRows
from unirl.algorithms.distillation import StudentRows
from unirl.algorithms.renoised import RenoisedRows
from unirl.algorithms.rewarded import KeptRows
from unirl.algorithms.transitions import TransitionRows, policy_of, unit_step
from unirl.core.types import ScoredRollout
from unirl.train.layer_errors import LayerError, layer_errors

NUM_ALONE = 2
"""Rows of each step that are computed once more in a batch of their own."""


@dataclass(frozen=True)
class Sampled:
    """What the engine did, over all samples of the window."""

    sigmas: tuple[float, ...]
    """T+1 noise levels of the first rollout."""
    samples_by_step: Mapping[int, int]
    """How many samples took each stochastic step."""
    num_samples: int
    num_groups: int
    """Those that failed scorers dropped are left out."""
    num_equal_groups: int
    """Groups in which every advantage is 0."""


@dataclass(frozen=True)
class Replay:
    """Transitions of one step, computed again as training computes them."""

    std: float
    """Of the step, in full."""
    mean_difference: float
    """|log-prob - engine's log-prob|, mean over rows."""
    max_difference: float
    max_alone_difference: float
    """|log-prob in a micro-batch - log-prob in a batch of its own|."""


@dataclass(frozen=True)
class Level:
    """One micro-batch of rows of the same step, or of about the same noise level."""

    step: int | None
    """None where rows are not steps of a path."""
    sigma: float | None
    """Mean noise level of the rows; None where they are of an unknown kind."""
    num_rows: int
    gradient_norm: float
    """Of the rows' mean loss."""
    replay: Replay | None
    """None where rows are not steps of a path."""


@dataclass(frozen=True)
class Gradients:
    """Of the mean loss of all rows that were looked at."""

    norm: float
    num_elements: int
    """Elements of the tensors that got a gradient."""
    silent: tuple[str, ...]
    """Trained tensors whose gradient is exactly 0 without a reason."""
    num_waiting: int
    """Adapter matrices A whose gradient is 0 because their B is 0."""

    @property
    def rms(self) -> float:
        """Root mean square of an element."""
        return self.norm / max(self.num_elements, 1) ** 0.5


@dataclass(frozen=True)
class Measured:
    """All numbers of an examination."""

    sampled: Sampled
    progress: float
    """Part of the run that is done, in [0, 1)."""
    latent_elements: int
    """D."""
    levels: tuple[Level, ...]
    """By step, or from the highest noise level to the lowest; none without rows to train on."""
    max_log_ratio: float | None
    """Largest |log ratio| of all rows before the first update; None without a ratio."""
    gradients: Gradients
    worst_layer: LayerError | None
    """In the loss of one row; None without rows."""


def measure(
    policy: Policy,
    algorithm: Algorithm[Any, Any],
    scored: Sequence[ScoredRollout],
    micro_batch_size: int,
) -> Measured:
    """Look at the rollouts of one window; the policy's network is on the device, whole."""
    rows = algorithm.rows(scored)
    parts = _one_micro_batch_each(rows, _trained(scored), micro_batch_size)
    if not parts:
        return Measured(sampled(scored), policy.progress, 0, (), None, Gradients(0, 0, (), 0), None)
    with torch.no_grad():
        anchored, _ = algorithm.anchor(policy, rows, parts)
    losses = _backward(policy, algorithm, anchored, parts)
    replays = [_replay(policy, rows, index) for index in parts]
    return Measured(
        sampled(scored),
        policy.progress,
        scored[0].trajectory.final_latents[0].numel(),
        tuple(
            _level(rows.select(index), norm, replay)
            for index, norm, replay in zip(parts, losses.norms, replays, strict=True)
        ),
        losses.max_log_ratio,
        losses.gradients,
        _worst_layer(policy, algorithm, anchored.select(parts[0][:1])),
    )


def _worst_layer(policy: Policy, algorithm: Algorithm[Any, Any], row: Rows) -> LayerError | None:
    with layer_errors(policy.model.network) as found:
        algorithm.loss(policy, row)
    return max(found, key=_size_of_error, default=None)


def _size_of_error(one: LayerError) -> float:
    """NaN is the worst."""
    return math.inf if math.isnan(one.error) else one.error


# --- what was sampled ---------------------------------------------------------------------------


def sampled(scored: Sequence[ScoredRollout]) -> Sampled:
    """Steps are read from the engine's trajectories, not from what it was asked for."""
    steps = Counter(step for one in scored for step in one.trajectory.steps.flatten().tolist())
    group_size = scored[0].request.samples_per_prompt
    advantages = torch.cat([one.advantages for one in scored]).view(-1, group_size)
    valid = torch.cat([one.rewards.valid for one in scored]).view(-1, group_size).any(dim=1)
    return Sampled(
        scored[0].request.sigmas,
        dict(sorted(steps.items())),
        sum(one.num_samples for one in scored),
        int(valid.sum()),
        int((valid & (advantages == 0).all(dim=1)).sum()),
    )


def _trained(scored: Sequence[ScoredRollout]) -> Tensor:
    """[N] bool: which of the samples are trained on."""
    return torch.cat([one.trained[one.places] for one in scored])


# --- which rows are looked at -------------------------------------------------------------------


def noise_levels(rows: Rows) -> Tensor | None:
    """[R] the level each row is about; None for rows of an unknown kind."""
    match rows:
        case TransitionRows():
            return rows.sigma
        case StudentRows():
            return rows.transitions.sigma
        case RenoisedRows():
            return rows.time
        case PairRows():
            return rows.preferred.time
        case KeptRows():
            return rows.sigma[:, 0]
        case _:
            return None


def transitions_of(rows: Rows) -> TransitionRows | None:
    """The steps of a path that rows are, if they are."""
    match rows:
        case TransitionRows():
            return rows
        case StudentRows():
            return rows.transitions
        case _:
            return None


def _kinds(rows: Rows) -> Tensor:
    """[R] int64: the step of each row, or minus its noise level in tenths, or 0 for all."""
    transitions, levels = transitions_of(rows), noise_levels(rows)
    if transitions is not None:
        return transitions.step
    if levels is not None:
        return -(10 * levels).round().long()
    return torch.zeros_like(rows.sample_index)


def _one_micro_batch_each(rows: Rows, trained: Tensor, size: int) -> list[Tensor]:
    """Indices of at most `size` rows of each kind, spread over the samples that are trained."""
    kinds, samples = _kinds(rows), rows.sample_index
    taken = (samples >= 0) & trained.to(samples.device)[samples]
    parts = []
    for kind in kinds[taken].unique():  # ascending
        candidates = torch.nonzero(taken & (kinds == kind)).flatten()
        count = min(size, len(candidates))
        places = torch.arange(count, device=candidates.device) * len(candidates) // count
        parts.append(candidates[places])
    return parts


def _level(rows: Rows, gradient_norm: float, replay: Replay | None) -> Level:
    transitions, levels = transitions_of(rows), noise_levels(rows)
    return Level(
        None if transitions is None else int(transitions.step[0]),
        None if levels is None else float(levels.mean()),
        len(rows),
        gradient_norm,
        replay,
    )


# --- rollout against replay ---------------------------------------------------------------------


@torch.no_grad()
def _replay(policy: Policy, rows: Rows, index: Tensor) -> Replay | None:
    transitions = transitions_of(rows)
    if transitions is None:
        return None
    part = transitions.select(index)
    together = _log_prob(policy, part)
    alone = [_log_prob(policy, transitions.select(row)) for row in index[:NUM_ALONE].split(1)]
    difference = (together - part.rollout_log_prob).abs()
    return Replay(
        float(unit_step(part).std.mean()),
        float(difference.mean()),
        float(difference.max()),
        float((together[:NUM_ALONE] - torch.cat(alone)).abs().max()),
    )


def _log_prob(policy: Policy, rows: TransitionRows) -> Tensor:
    return policy_of(policy, rows).log_prob(rows.next_latents)


# --- losses and gradients -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Losses:
    norms: Sequence[float]
    """Gradient norm of the mean loss of each slice."""
    max_log_ratio: float | None
    gradients: Gradients


def _backward(
    policy: Policy, algorithm: Algorithm[Any, Any], anchored: Rows, parts: Sequence[Tensor]
) -> _Losses:
    """Losses and gradients of the parts, one after the other, in the memory of a training step."""
    trained = {n: p for n, p in policy.model.network.named_parameters() if p.requires_grad}
    num_rows = sum(len(part) for part in parts)
    norms, log_ratios = [], []
    try:
        for part in parts:
            losses = algorithm.loss(policy, anchored.select(part))
            with _listening(trained.values()) as norm_of_each:
                (losses.loss.sum() / num_rows).backward()
            norms.append(_norm(norm_of_each) * num_rows / len(part))
            if "log_ratio" in losses.details:
                log_ratios.append(float(losses.details["log_ratio"].abs().max()))
        gradients = _gradients(trained)
    finally:
        for parameter in trained.values():
            parameter.grad = None
    return _Losses(norms, max(log_ratios, default=None), gradients)


@contextmanager
def _listening(parameters: Iterable[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Norms of what a backward adds to each gradient: no second set of gradients is needed."""
    norms: list[Tensor] = []

    def listen(gradient: Tensor) -> None:
        norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))

    hooks = [parameter.register_hook(listen) for parameter in parameters]
    try:
        yield norms
    finally:
        for hook in hooks:
            hook.remove()


def _gradients(trained: Mapping[str, nn.Parameter]) -> Gradients:
    norms = {
        name: torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
        for name, parameter in trained.items()
        if parameter.grad is not None
    }
    moved = [name for name, norm in norms.items() if bool(norm != 0)]  # NaN counts as moved
    still = trained.keys() - set(moved)
    waiting = {name for name in still if _is_before_zero(name, trained)}
    return Gradients(
        _norm([norms[name] for name in moved]),
        sum(trained[name].numel() for name in moved),
        tuple(sorted(still - waiting)),
        len(waiting),
    )


def _is_before_zero(name: str, trained: Mapping[str, nn.Parameter]) -> bool:
    """Whether this is the matrix A of an adapter whose B is 0, as at its start."""
    other = trained.get(name.replace(".lora_A.", ".lora_B."))
    return ".lora_A." in name and other is not None and not bool(other.any())


def _norm(norms: Sequence[Tensor]) -> float:
    return float(torch.stack(list(norms)).norm()) if norms else 0.0
