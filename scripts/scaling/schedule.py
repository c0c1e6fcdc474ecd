"""What one window asks of a rank: samples, forwards and backwards, moves of weights.

Arithmetic of the recipe alone; no network is needed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from unirl.config.components import engine_capabilities, sync_capabilities
from unirl.config.residency_checks import in_shards
from unirl.config.schema import RunConfig
from unirl.residency.planner import ResidencyPlanner
from unirl.residency.policy import ResidencyPolicy, Role
from unirl.residency.transition import Transition
from unirl.samplers.window import select_sde_steps
from unirl.trainer.windows import sync_is_due

PROBE_FORWARDS = 2
"""A verified sync runs the trained network on one input, with the adapter and without."""


@dataclass(frozen=True)
class Schedule:
    """Counts per rank and window of a run without evaluation and saves."""

    prompts: int
    """Per rollout."""
    generations: int
    """Rollouts that sample with the trained weights; 0 with an engine that has its own."""
    sampling_forwards: int
    """Network calls with the trained weights in all of them. Guidance adds none: both halves are
    one batch."""
    forwards: int
    """Network calls of the optimizer steps: the anchor, the policy, the reference of the KL."""
    backwards: int
    """Micro-batches of all optimizer steps."""
    optimizer_steps: int
    sync_forwards: int
    """Network calls of the trained network for the probe of a weight sync."""
    syncs: int
    """Reads of the trained weights for an engine with weights of its own."""
    busy: float
    """Share of the micro-batches, over all ranks, that hold rows: a rank without rows of an
    optimizer step runs fillers beside the others."""


def schedule(config: RunConfig, num_ranks: int) -> Schedule:
    """config.batch_size must be a multiple of num_ranks."""
    slices = [_slices(config, num_ranks, part) for part in range(_num_parts(config))]
    in_turn = sum(max(of_ranks) for of_ranks in slices)
    shares = engine_capabilities(config).shares_train_weights
    sampling, algorithm = config.sampling, config.algorithm
    prompts = config.batch_size // num_ranks
    samples = prompts * sampling.samples_per_prompt
    chunks = -(-samples // (config.rollout.forward_batch_size or samples))
    rollouts = config.accumulate_rollouts if shares else 0
    before = (algorithm.old_log_prob == "replay") + (algorithm.kl_coefficient > 0)
    return Schedule(
        prompts=prompts,
        generations=rollouts,
        sampling_forwards=rollouts * chunks * sampling.num_inference_steps,
        forwards=in_turn * (1 + before),
        backwards=in_turn,
        optimizer_steps=_num_parts(config),
        sync_forwards=0 if shares or not config.sync.verify else PROBE_FORWARDS,
        syncs=0 if shares else 1,
        busy=sum(map(sum, slices)) / (in_turn * num_ranks),
    )


def _num_parts(config: RunConfig) -> int:
    return config.stack.num_updates_per_batch


def _slices(config: RunConfig, num_ranks: int, part: int) -> list[int]:
    """Micro-batches with rows of optimizer step `part`, by rank.

    Parts are consecutive samples of the window; the samples of prompt p lie on rank p mod
    num_ranks. Shuffled, a part takes equally many samples of every prompt instead.
    """
    group, parts = config.sampling.samples_per_prompt, _num_parts(config)
    num_prompts = config.batch_size * config.accumulate_rollouts
    if config.stack.shuffle_updates:
        samples = dict.fromkeys(range(num_ranks), -(-num_prompts * group // num_ranks // parts))
    else:
        total = num_prompts * group
        first, end = (-(-total * bound // parts) for bound in (part, part + 1))
        samples = Counter(place // group % num_ranks for place in range(first, end))
    rows = recorded_steps(config)
    return [-(-samples[rank] * rows // config.stack.micro_batch_size) for rank in range(num_ranks)]


def recorded_steps(config: RunConfig) -> int:
    """Rows per sample."""
    (steps, *_) = select_sde_steps(
        config.sampling.sde_steps,
        config.sampling.num_inference_steps,
        rollout_id=0,
        seed=config.seed,
        group_size=config.sampling.samples_per_prompt,
        samples_per_start=config.sampling.num_samples_per_start,
    )
    return len(steps)


def transitions(config: RunConfig) -> list[str]:
    """Moves of a window in the middle of a run, e.g. `rollout onload`; the same on every rank."""
    moved: list[Transition] = []
    shares = engine_capabilities(config).shares_train_weights
    tracked = [role for role in Role if not (role is Role.TRAIN and shares)]
    planner = ResidencyPlanner(
        ResidencyPolicy.of(config),
        dict.fromkeys(tracked, ()),
        moved.append,
        lambda: None,
    )
    size = config.accumulate_rollouts
    for window in range(3):
        moved.clear()
        _request_window(config, planner, range(window * size, (window + 1) * size))
    return [transition.text for transition in moved]


def _request_window(config: RunConfig, planner: ResidencyPlanner, window: range) -> None:
    """What the trainer and its phases ask of the planner in one window."""
    sync = sync_capabilities(config)
    has_adapter = sync is None or not sync.staged or not planner.parkable(Role.TRAIN)
    for rollout in window:
        if not has_adapter and sync_is_due(
            rollout, config.weight_sync_interval, None, config.save_is_due(rollout)
        ):
            if planner.is_on_device(Role.TRAIN):
                planner.make_room(Role.TRAIN)
            elif in_shards(config):  # gathered on the device; whole weights are read on the host
                planner.enter(Role.TRAIN)
            has_adapter = True
        planner.enter(Role.ROLLOUT)
        planner.set(Role.ROLLOUT, on_device=False)
        planner.enter(Role.REWARD)
    planner.enter(Role.TRAIN)
