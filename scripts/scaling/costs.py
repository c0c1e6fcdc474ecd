"""From layout and schedule to what a rank holds and what it receives over the network.

Volumes are bytes a rank receives in a window with ring collectives over n ranks: an all-gather or
reduce-scatter of b bytes moves b (n - 1) / n, an all-reduce twice that. Exchanged objects (rewards,
norms, counts) are some kilobytes a window and left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from scaling.schedule import Schedule

from unirl.config.components import engine_capabilities
from unirl.config.schema import RunConfig
from unirl.planning.layout import Layout


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, without activations, text encoders and decoder."""

    base: int
    """Its shard of the frozen weights."""
    trained: int
    """Its shard of the trained weights, float32."""
    gradients: int
    """Most that is held at a time."""
    moments: int
    """Adam's two, of its shard."""
    gathered: int
    """Most that is gathered at a time: the root and the blocks in flight, or with rollout.unshard
    the whole network."""
    engine: int
    """The whole copy of an engine with weights of its own."""


@dataclass(frozen=True)
class Volume:
    """Bytes one rank receives per window."""

    all_gather: int
    """Weights, for forwards and backwards."""
    reduce_scatter: int
    """Gradients, within a shard group."""
    all_reduce: int
    """Gradients, between replicas."""
    sync: int
    """Trained weights, read whole for the engine."""


def memory(layout: Layout, counts: Schedule, config: RunConfig) -> Memory:
    shares = engine_capabilities(config).shares_train_weights
    sharded = layout.num_shards > 1
    unshards = sharded and shares and config.rollout.unshard
    in_flight = layout.largest_gathered_bytes(config.backend.prefetch)
    return Memory(
        base=layout.base_bytes,
        trained=layout.trained_bytes,
        gradients=_gradients(layout, counts, config),
        moments=2 * layout.trained_bytes,
        gathered=layout.gather_bytes if unshards else in_flight,
        engine=0 if shares else layout.network_bytes,
    )


def _gradients(layout: Layout, counts: Schedule, config: RunConfig) -> int:
    accumulates = counts.backwards > counts.optimizer_steps
    if layout.num_shards == 1 or (config.defers_reduce and accumulates):
        return layout.whole_trained_bytes
    return layout.trained_bytes + max(unit.trained_bytes for unit in layout.units)


def volume(layout: Layout, counts: Schedule, config: RunConfig) -> Volume:
    shards, replicas = layout.num_shards, layout.num_replicas
    in_sampling = counts.generations if config.rollout.unshard else counts.sampling_forwards
    gathers = in_sampling + counts.forwards + counts.backwards + counts.sync_forwards
    reduces = counts.optimizer_steps if config.defers_reduce else counts.backwards
    trained = layout.padded_trained_bytes
    return Volume(
        all_gather=gathers * _from_others(layout.gather_bytes, shards),
        reduce_scatter=reduces * _from_others(trained, shards),
        # A rank reduces only its shard with its counterparts in the other groups.
        all_reduce=reduces * 2 * _from_others(trained // shards, replicas),
        sync=counts.syncs * _from_others(trained, shards),
    )


def _from_others(num_bytes: int, num_ranks: int) -> int:
    """The part of num_bytes that lies on the other ranks, each having as much."""
    return num_bytes * (num_ranks - 1) // num_ranks
