"""What driving several ranks costs per training window: exchanges between ranks, and their time.

Trains the quickstart's model on 1, 2 and 4 ranks and times every call of `Ranks`: first the wait
for the slowest rank (which is the work, not the driver), then the exchange itself.

    python scripts/bench_ranks.py                  # about two minutes on two CPU cores
    python scripts/bench_ranks.py --ranks 1 2      # fewer

Gradients and gathered weights travel over the train backend, not over `Ranks`; docs/scaling.md has
their volume.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from unirl.cli.check import checked
from unirl.config.schema import RunConfig
from unirl.distributed.group import joined
from unirl.distributed.ranks import Ranks
from unirl.residency.trace import TransitionLog
from unirl.runtime.build import build_roles, build_trainer, load_all_prompts
from unirl.tracking.tracker import Tracker
from unirl.trainer.checkpoints import Checkpoints

T = TypeVar("T")


class TimedRanks(Ranks):
    """Counts and times the exchanges of another one."""

    def __init__(self, inner: Ranks) -> None:
        self.rank, self.world_size = inner.rank, inner.world_size
        self._inner = inner
        self.num_exchanges = 0
        self.exchange_seconds = self.waiting_seconds = 0.0

    def _after_the_slowest(self) -> float:
        """Wait for all ranks, and the time from which the exchange counts."""
        before = time.perf_counter()
        self._inner.barrier()
        now = time.perf_counter()
        self.waiting_seconds += now - before
        self.num_exchanges += 1
        return now

    def gather(self, value: T) -> list[T]:
        start = self._after_the_slowest()
        values = self._inner.gather(value)
        self.exchange_seconds += time.perf_counter() - start
        return values

    def broadcast(self, value: T) -> T:
        start = self._after_the_slowest()
        value = self._inner.broadcast(value)
        self.exchange_seconds += time.perf_counter() - start
        return value

    def barrier(self) -> None:
        start = self._after_the_slowest()
        self._inner.barrier()
        self.exchange_seconds += time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of driving several ranks.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--recipe", default="quickstart")
    args = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(args)
        return
    print("ranks   exchanges/window   exchange ms   waiting ms   window s   exchange share")
    for num_ranks in args.ranks:
        row = json.loads(start(num_ranks, args))
        print(
            f"{num_ranks:5} {row['exchanges']:18.1f} {1e3 * row['exchange']:13.2f} "
            f"{1e3 * row['waiting']:12.1f} {row['window']:10.2f} "
            f"{row['exchange'] / row['window']:15.2%}"
        )


def start(num_ranks: int, args: argparse.Namespace) -> str:
    """The JSON line of rank 0."""
    words = ["--windows", str(args.windows), "--recipe", args.recipe]
    engine = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        subprocess.run(
            [*engine, f"--nproc-per-node={num_ranks}", __file__, *words],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "BENCH_RANKS_RESULT": str(result)},
        )
        return result.read_text()


def run_rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    num_ranks = int(os.environ["WORLD_SIZE"])
    config = checked(args.recipe, [f"num_devices={num_ranks}", "num_threads=1"], None)
    with ExitStack() as resources:
        ranks = TimedRanks(resources.enter_context(joined()))
        seconds = train(config, ranks, args.windows, resources)
    if ranks.is_main:
        row = {
            "exchanges": ranks.num_exchanges / args.windows,
            "exchange": ranks.exchange_seconds / args.windows,
            "waiting": ranks.waiting_seconds / args.windows,
            "window": seconds / args.windows,
        }
        Path(os.environ["BENCH_RANKS_RESULT"]).write_text(json.dumps(row))


def train(config: RunConfig, ranks: TimedRanks, num_windows: int, resources: ExitStack) -> float:
    """Seconds for `num_windows` windows after a first one, which is not counted."""
    prompts = load_all_prompts(config)
    roles = build_roles(config, prompts, ranks)
    folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
    transitions = TransitionLog(folder / "transitions.jsonl")
    resources.callback(transitions.close)
    trainer = build_trainer(
        config,
        prompts,
        roles,
        Checkpoints(config, roles.stack, folder, None, ranks),
        folder,
        transitions,
        Tracker([]),
        lambda: ranks.any(False),
        ranks,
    )
    trainer.train_window(range(1))
    ranks.num_exchanges, ranks.exchange_seconds, ranks.waiting_seconds = 0, 0.0, 0.0
    began = time.perf_counter()
    for window in range(1, num_windows + 1):
        trainer.train_window(range(window, window + 1))
        ranks.any(False)  # the loop asks whether to stop before each window
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
