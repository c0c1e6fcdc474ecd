"""What driving several ranks costs per training window: exchanges between ranks, and their time.

Trains the quickstart's model on 1, 2 and 4 ranks and times every call of `Ranks`: first the wait
for the slowest rank (which is the work, not the driver), then the exchange itself.

    python scripts/bench_ranks.py                  # about two minutes on two CPU cores
    python scripts/bench_ranks.py --ranks 2 rollout.unshard=true

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
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from unirl.cli.check import checked
from unirl.config.schema import RunConfig
from unirl.distributed.group import joined
from unirl.distributed.ranks import Ranks
from unirl.residency.perfetto import TraceFile
from unirl.residency.policy import ResidencyPolicy
from unirl.residency.trace import TransitionLog
from unirl.runtime.build import build_host, build_reward_role, build_roles, load_all_prompts
from unirl.runtime.loop import build_trainer
from unirl.tracking.tracker import Panel, Row, Sink, Tracker
from unirl.trainer.archive import EvaluationArchive
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
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(args)
        os._exit(0)  # see unirl.train_diffusion
    print("ranks  exchanges/window  exchange ms  waiting ms  sampling s  window s  exchange share")
    for num_ranks in args.ranks:
        row = json.loads(start(num_ranks, args))
        print(
            f"{num_ranks:5} {row['exchanges']:17.1f} {1e3 * row['exchange']:12.2f} "
            f"{1e3 * row['waiting']:11.1f} {row['sampling']:11.3f} {row['window']:9.3f} "
            f"{row['exchange'] / row['window']:15.2%}"
        )


def start(num_ranks: int, args: argparse.Namespace) -> str:
    """The JSON line of rank 0."""
    words = ["--windows", str(args.windows), "--recipe", args.recipe, *args.overrides]
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
    words = [f"num_devices={num_ranks}", "num_threads=1", *args.overrides]
    config = checked(args.recipe, words, None)
    with ExitStack() as resources:
        ranks = TimedRanks(resources.enter_context(joined()))
        sampling, window = train(config, ranks, args.windows, resources)
    if ranks.is_main:
        row = {
            "exchanges": ranks.num_exchanges / args.windows,
            "exchange": ranks.exchange_seconds / args.windows,
            "waiting": ranks.waiting_seconds / args.windows,
            "sampling": sampling,
            "window": window,
        }
        Path(os.environ["BENCH_RANKS_RESULT"]).write_text(json.dumps(row))


class Rows(Sink):
    """Keeps the metrics."""

    def __init__(self) -> None:
        self.metrics: list[Mapping[str, float]] = []

    def log(self, row: Row) -> None:
        self.metrics.append(row.metrics)

    def show(self, panel: Panel) -> None:
        return

    def close(self) -> None:
        return


def train(
    config: RunConfig, ranks: TimedRanks, num_windows: int, resources: ExitStack
) -> tuple[float, float]:
    """Seconds of sampling and of a whole window: means after a first one, which is not counted."""
    rows = Rows()
    prompts = load_all_prompts(config)
    host = build_host(config)
    reward = build_reward_role(config, prompts, host)
    roles = build_roles(config, prompts, reward, host, ranks)
    folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
    transitions = TransitionLog(
        folder / "transitions.jsonl", TraceFile(folder / "trace.json", rank=0)
    )
    resources.callback(transitions.close)
    checkpoints = Checkpoints(config, roles.stack.weights, folder, None, ranks)
    trainer = build_trainer(
        config,
        prompts,
        roles,
        ResidencyPolicy.of(config),
        checkpoints,
        EvaluationArchive(folder, config),
        transitions,
        Tracker([rows]),
        lambda: ranks.any(False),
        ranks,
        checkpoints.progress,
    )
    trainer.train_window(range(1))
    ranks.num_exchanges, ranks.exchange_seconds, ranks.waiting_seconds = 0, 0.0, 0.0
    began = time.perf_counter()
    for window in range(1, num_windows + 1):
        trainer.train_window(range(window, window + 1))
        ranks.any(False)  # the loop asks whether to stop before each window
    seconds = time.perf_counter() - began
    sampling = [metrics["perf/rollout_seconds"] for metrics in rows.metrics[1:]]
    return sum(sampling) / num_windows, seconds / num_windows


if __name__ == "__main__":
    main()
