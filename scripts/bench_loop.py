"""Times our training window against a bare hand-written loop that does the same work.

A row for each algorithm's recipe on the shipped model. Both sample, score and train with the
recipe's settings, in one process and in turns; that their networks ran on equally many samples and
that they took equally many optimizer steps is checked. Scorers run in one thread. Ratios are those
of medians, of time and of this process's CPU time, which other work on the machine disturbs less;
forwards and backwards are samples of a window. Start-up of the commands that load no weights is
timed too.

    python scripts/bench_loop.py                                 # about 5 minutes on one core
    python scripts/bench_loop.py --recipes quickstart --pairs 20
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from bare.loop import BareLoop
from compare_algorithms import QUICKSTART, RECIPES, path_of

from unirl.cli.compose import compose
from unirl.config.schema import RewardConfig, RunConfig, ScorerConfig
from unirl.distributed.ranks import OneRank
from unirl.models.forward_count import ForwardCount
from unirl.residency.perfetto import TraceFile
from unirl.residency.policy import ResidencyPolicy
from unirl.residency.trace import TransitionLog
from unirl.runtime.build import build_host, build_reward_role, build_roles, load_all_prompts
from unirl.runtime.loop import build_trainer
from unirl.tracking.jsonl import JsonlSink
from unirl.tracking.tracker import Tracker
from unirl.train.stack import TrainStack
from unirl.trainer.archive import EvaluationArchive
from unirl.trainer.checkpoints import Checkpoints
from unirl.trainer.diffusion import DiffusionTrainer


@dataclass(frozen=True)
class Cost:
    """Of one window."""

    seconds: float
    cpu_seconds: float
    """Of this process: what others do on the machine counts less."""


@dataclass(frozen=True)
class Comparison:
    """Windows of one recipe."""

    recipe: str
    ours: Sequence[Cost]
    bare: Sequence[Cost]
    work: Mapping[str, int]
    """What each side did, with the windows that warmed it up."""

    def row(self) -> str:
        """Of a Markdown table."""
        ours, bare, windows = median(self.ours), median(self.bare), len(self.ours) + 1
        cells = (
            f"{self.recipe:<19}",
            f"{ours.seconds:8.2f}",
            f"{bare.seconds:8.2f}",
            f"{ours.seconds / bare.seconds:11.2f}",
            f"{ours.cpu_seconds / bare.cpu_seconds:8.2f}",
            f"{self.work['denoiser_forwards'] / windows:8.0f}",
            f"{self.work['denoiser_backwards'] / windows:9.0f}",
        )
        return f"| {' | '.join(cells)} |"


HEAD = """\
| recipe              | ours (s) | bare (s) | ours / bare | CPU time | forwards | backwards |
|:--------------------|---------:|---------:|------------:|---------:|---------:|----------:|"""


def median(costs: Sequence[Cost]) -> Cost:
    return Cost(
        statistics.median(cost.seconds for cost in costs),
        statistics.median(cost.cpu_seconds for cost in costs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=3, help="windows of each side")
    everything = [QUICKSTART, *RECIPES]
    parser.add_argument("--recipes", nargs="+", choices=everything, default=everything)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(HEAD)
    for recipe in args.recipes:
        print(compare(recipe, args.pairs).row(), flush=True)
    print()
    for command in (["--help"], ["check", QUICKSTART]):
        print(f"unirl {' '.join(command):18} {start_up(command):.2f} s")


def compare(recipe: str, num_pairs: int, overrides: Sequence[str] = ()) -> Comparison:
    """`num_pairs` windows of each side, after one that warms up.

    Raises AssertionError when the sides did not do the same work.
    """
    config = settings(recipe, overrides)
    torch.manual_seed(0)
    ours: list[Cost] = []
    bares: list[Cost] = []
    with ExitStack() as resources:
        trainer, stack = our_trainer(config, resources)
        bare = BareLoop(config)
        counts = [ForwardCount([stack.model.network]), ForwardCount(bare.networks)]
        for window in range(num_pairs + 1):
            ours.append(cost(lambda w=window: trainer.train_window(range(w, w + 1))))
            bares.append(cost(lambda w=window: bare.window(w)))
    work = {**counts[0].totals(), "optimizer_steps": stack.weight_version}
    require_equal(recipe, work, {**counts[1].totals(), "optimizer_steps": bare.num_steps})
    return Comparison(recipe, ours[1:], bares[1:], work)


def require_equal(recipe: str, ours: Mapping[str, int], bare: Mapping[str, int]) -> None:
    if ours != bare:
        raise AssertionError(f"{recipe}: ours did {ours}, the bare loop {bare}")


def settings(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The recipe without evaluations and saves."""
    words = ["eval_interval=0", "save_interval=0", "num_rollouts=1000", "doctor=false"]
    config = compose(path_of(recipe), [*words, *overrides])
    reward = config.reward or RewardConfig()
    scorers = {name: on_one_thread(scorer) for name, scorer in reward.scorers.items()}
    return config.model_copy(update={"reward": reward.model_copy(update={"scorers": scorers})})


def on_one_thread(scorer: ScorerConfig) -> ScorerConfig:
    threads = {"num_threads": 1} if "num_threads" in scorer.args else {}
    return scorer.model_copy(update={"args": {**scorer.args, **threads}})


def our_trainer(config: RunConfig, resources: ExitStack) -> tuple[DiffusionTrainer, TrainStack]:
    folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
    prompts = load_all_prompts(config)
    host = build_host(config)
    reward = build_reward_role(config, prompts, host)
    roles = build_roles(config, prompts, reward, host, OneRank())
    transitions = TransitionLog(
        folder / "transitions.jsonl", TraceFile(folder / "trace.json", rank=0)
    )
    resources.callback(transitions.close)
    tracker = resources.enter_context(Tracker([JsonlSink(folder / "metrics.jsonl")]))
    checkpoints = Checkpoints(config, roles.stack.weights, folder / "checkpoints", None, OneRank())
    trainer = build_trainer(
        config,
        prompts,
        roles,
        ResidencyPolicy.of(config),
        checkpoints,
        EvaluationArchive(folder, config),
        transitions,
        tracker,
        lambda: False,
        OneRank(),
        checkpoints.progress,
    )
    return trainer, roles.stack


def cost(work: Callable[[], object]) -> Cost:
    started, cpu_started = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - started, time.process_time() - cpu_started)


def start_up(command: list[str]) -> float:
    """Best of three, in seconds; fails when torch or diffusers was imported."""
    code = (
        "import sys; from unirl.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'diffusers'} & set(sys.modules), 'imports torch or diffusers'"
    )
    return min(
        cost(
            lambda: subprocess.run(
                [sys.executable, "-c", code, *command], check=True, capture_output=True
            )
        ).seconds
        for _ in range(3)
    )


if __name__ == "__main__":
    main()
