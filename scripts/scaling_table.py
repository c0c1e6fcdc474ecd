"""What a recipe costs on 8 to 512 ranks: bytes per rank and traffic, computed without weights.

    python scripts/scaling_table.py
    python scripts/scaling_table.py diffusion/sd3/sd3_trainside --network flux2-32b --ranks 64
    python scripts/scaling_table.py --mesh hybrid --shard-size 8 rollout.unshard=true

Networks are built on the meta device and sharded by the train stack's own code over a process group
that pretends to have the other ranks; nothing is measured on GPUs. Words with `=` override keys of
the recipes. Where a batch does not fit the ranks, the row is marked and computed with the next
batch_size that does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from scaling.costs import memory, volume
from scaling.networks import NETWORKS, build_network
from scaling.schedule import schedule, transitions

from unirl.cli.compose import compose
from unirl.config.schema import RunConfig
from unirl.core.errors import ConfigError, UnirlError
from unirl.planning.layout import lay_out, pretended_group

RECIPES = ("diffusion/sd3/sd3_trainside", "diffusion/sd3/sd3_replica_lora")
RANKS = (8, 16, 64, 512)
HEAD = (
    f"{'network':13}{'ranks':>6}{'prompts':>8}{'samples':>8}{'busy':>5} |"
    f"{'base':>9}{'trained':>9}{'grads':>9}{'moments':>9}{'gathered':>9}{'engine':>9} |"
    f"{'gather':>9}{'scatter':>9}{'reduce':>9}{'sync':>9} |{'seconds':>8}"
)


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_intermixed_args(argv)
    recipes = [word for word in args.words if "=" not in word]
    overrides = [word for word in args.words if "=" in word]
    try:
        for recipe in recipes or RECIPES:
            # The networks' shapes are known here, so any existing path will do.
            config = compose(recipe, ["model.path=.", *overrides])
            print_table(recipe, config, args)
    except UnirlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 0


def print_table(recipe: str, config: RunConfig, args: argparse.Namespace) -> None:
    moves = ", ".join(transitions(config)) or "none"
    print(f"{recipe}, mesh {args.mesh}\nmoves per window and rank: {moves}\n{HEAD}")
    notes: dict[str, None] = {}  # in order, each once
    for name in args.network or NETWORKS:
        for num_ranks in args.ranks:
            fitted, note = fit(on_mesh(config, num_ranks, args.mesh, args.shard_size))
            print(row(name, fitted, mark="*" if note else ""))
            notes |= {note: None} if note else {}
    print("".join(f"* {note}\n" for note in notes))


def on_mesh(config: RunConfig, num_ranks: int, mesh: str, shard_size: int) -> RunConfig:
    """The recipe on so many ranks. Raises ConfigError when shard groups do not fit them."""
    if mesh == "hybrid" and num_ranks % shard_size:
        raise ConfigError(
            f"{num_ranks} ranks / shard size {shard_size} = {num_ranks / shard_size:.2f} shard "
            "groups, which is not a whole number. Change --ranks or --shard-size."
        )
    size = shard_size if mesh == "hybrid" else None
    backend = config.backend.model_copy(update={"mesh": mesh, "shard_size": size})
    return config.model_copy(update={"num_devices": num_ranks, "backend": backend})


def fit(config: RunConfig) -> tuple[RunConfig, str | None]:
    """The configuration with a batch that fits its ranks, and why its own does not."""
    batch, ranks = config.batch_size, config.num_devices
    if batch % ranks == 0:
        return config, None
    smallest = -(-batch // ranks) * ranks
    note = (
        f"impossible: batch_size {batch} / {ranks} ranks = {batch / ranks:.3g} prompts per rank, "
        f"not a whole number; computed with batch_size={smallest}"
    )
    return config.model_copy(update={"batch_size": smallest}), note


def row(name: str, config: RunConfig, mark: str = "") -> str:
    """One line of the table for a network on config.num_devices ranks."""
    started = time.perf_counter()
    network, num_ranks = NETWORKS[name], config.num_devices
    with pretended_group(0, num_ranks):
        module = build_network(network, config)
        layout = lay_out(module, network.block_classes, config.backend, num_ranks)
    counts = schedule(config, num_ranks)
    held, received = memory(layout, counts, config), volume(layout, counts, config)
    samples = counts.prompts * config.sampling.samples_per_prompt
    seconds = time.perf_counter() - started
    return (
        f"{name:13}{f'{mark}{num_ranks}':>6}{counts.prompts:>8}{samples:>8}{counts.busy:>5.0%} |"
        + _columns(
            held.base, held.trained, held.gradients, held.moments, held.gathered, held.engine
        )
        + _columns(received.all_gather, received.reduce_scatter, received.all_reduce, received.sync)
        + f"{seconds:8.1f}"
    )


def _columns(*sizes: int) -> str:
    return "".join(f"{size_text(size):>9}" for size in sizes) + " |"


def size_text(num_bytes: int) -> str:
    """Three digits in KiB, MiB, GiB or TiB."""
    if num_bytes == 0:
        return "-"
    value, units = num_bytes / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.3g} {units[0]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="RECIPE | KEY=VALUE")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--network", action="append", choices=NETWORKS, help="default: all")
    parser.add_argument("--mesh", choices=("full", "hybrid", "no_shard"), default="full")
    parser.add_argument("--shard-size", type=int, default=8, help="hybrid: ranks of a shard group")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
