"""Times our training window against a bare hand-written loop that does the same work.

Both sample, score and train on the shipped model with the quickstart's settings, but with a start
noise for each sample: the same forwards, backwards, optimizer steps and reward calls. They run in
one process, alternating, and the ratio of medians is printed; the trainer's planning, recording and
metrics are what it shows. The second ratio is what equal starts in a group save. Start-up of the
commands that load no weights is timed too.

    python scripts/bench_loop.py            # about 3 minutes on one core
    python scripts/bench_loop.py --pairs 3  # quicker, noisier
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from unirl.cli.compose import compose
from unirl.config.resources import resolve_path
from unirl.config.schema import RunConfig
from unirl.data.prompts import load_prompts
from unirl.data.stream import PromptStream
from unirl.distributed.ranks import OneRank
from unirl.models.lora import attach_lora
from unirl.models.tiny_dit import load_tiny_dit
from unirl.residency.perfetto import TraceFile
from unirl.residency.policy import ResidencyPolicy
from unirl.residency.trace import TransitionLog
from unirl.reward.scorers.color import ColorScorer
from unirl.reward.scorers.ocr import OcrScorer
from unirl.runtime.build import build_host, build_reward_role, build_roles, load_all_prompts
from unirl.runtime.loop import build_trainer
from unirl.samplers.window import select_sde_steps
from unirl.tracking.jsonl import JsonlSink
from unirl.tracking.tracker import Tracker
from unirl.trainer.checkpoints import Checkpoints
from unirl.trainer.diffusion import DiffusionTrainer
from unirl.trainer.evaluation import Gallery


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=10, help="windows of each kind")
    parser.add_argument("--recipe", default="quickstart")
    args = parser.parse_args()
    torch.set_num_threads(1)
    plain = ["eval_interval=0", "save_interval=0", "num_rollouts=1000", "sampling.kernel=flow"]
    config = compose(args.recipe, plain)
    own_starts = compose(args.recipe, [*plain, "sampling.init_same_noise=false"])
    with ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
        trainer = our_trainer(own_starts, folder / "own", resources)
        sharing = our_trainer(config, folder / "shared", resources)
        bare = BareLoop(own_starts)
        ours, shared, bares = [], [], []
        for window in range(args.pairs + 1):
            ours.append(seconds(lambda w=window: trainer.train_window(range(w, w + 1))))
            shared.append(seconds(lambda w=window: sharing.train_window(range(w, w + 1))))
            bares.append(seconds(lambda w=window: bare.window(w)))
    report("training window", ours[1:], bares[1:])  # the first of each warms up
    saved = statistics.median(shared[1:]) / statistics.median(ours[1:])
    print(f"equal starts / starts of their own = {saved:.3f}")
    for command in (["--help"], ["check", args.recipe]):
        print(f"unirl {' '.join(command):18} {start_up(command):.2f} s")


def our_trainer(config: RunConfig, folder: Path, resources: ExitStack) -> DiffusionTrainer:
    folder.mkdir()
    prompts = load_all_prompts(config)
    host = build_host(config)
    reward = build_reward_role(config, prompts, host)
    roles = build_roles(config, prompts, reward, host, OneRank())
    transitions = TransitionLog(
        folder / "transitions.jsonl", TraceFile(folder / "trace.json", rank=0)
    )
    resources.callback(transitions.close)
    tracker = resources.enter_context(Tracker([JsonlSink(folder / "metrics.jsonl")]))
    checkpoints = Checkpoints(config, roles.stack, folder / "checkpoints", None, OneRank())
    return build_trainer(
        config,
        prompts,
        roles,
        ResidencyPolicy.of(config),
        checkpoints,
        Gallery(folder, config),
        transitions,
        tracker,
        lambda: False,
        OneRank(),
    )


class BareLoop:
    """Flow-GRPO on the tiny model in the fewest lines: tensors, two scorers, AdamW."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.network, self.tokenizer = load_tiny_dit(resolve_path(config.model.path))
        lora = config.stack.lora
        if lora is None:
            self.network.requires_grad_(True)
        else:
            targets = lora.target_modules or ["qkv", "proj", "fc1", "fc2"]
            attach_lora(self.network, lora.rank, lora.alpha, targets, seed=0)
        self.parameters = [p for p in self.network.parameters() if p.requires_grad]
        optimizer = config.stack.optimizer
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=optimizer.learning_rate,
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            weight_decay=optimizer.weight_decay,
        )
        self.ocr, self.color = OcrScorer(), ColorScorer()
        records = load_prompts(resolve_path(config.data.train), "data.train")
        self.stream = PromptStream(records, config.batch_size, config.seed)

    def velocity(self, x: torch.Tensor, sigma: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        bf16 = self.config.model.precision == "bf16"
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return self.network(x, sigma, ids).float()

    def gaussian(
        self, x: torch.Tensor, sigma: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and std of the next latents; sigma is [B]."""
        dt = -1 / self.config.sampling.num_inference_steps
        v, s = self.velocity(x, sigma, ids), sigma.view(-1, 1, 1, 1)
        diffusion = self.config.sampling.eta * (s / (1 - s.clamp(max=1 + dt))).sqrt()
        drift = diffusion**2 / (2 * s) * dt
        return x * (1 + drift) + v * (dt + drift * (1 - s)), diffusion * (-dt) ** 0.5

    @torch.no_grad()
    def sample(
        self, ids: torch.Tensor, stochastic: tuple[int, ...]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
        """Images in [-1, 1], and (before, after, sigma, log-prob) of each stochastic step."""
        count = self.config.sampling.num_inference_steps
        x = torch.randn(len(ids), 3, 16, 32)
        recorded = []
        for step in range(count):
            sigma = torch.full((len(ids),), 1 - step / count)
            if step not in stochastic:
                x = x - self.velocity(x, sigma, ids) / count
                continue
            mean, std = self.gaussian(x, sigma, ids)
            following = mean + std * torch.randn_like(x)
            recorded.append((x, following, sigma, log_prob(following, mean, std)))
            x = following
        return x, recorded

    def window(self, rollout_id: int) -> None:
        config, group = self.config, self.config.sampling.samples_per_prompt
        records = [r for r in self.stream.batch(rollout_id).records for _ in range(group)]
        ids = self.tokenizer.encode([r.text for r in records])
        steps = select_sde_steps(
            config.sampling.sde_steps, config.sampling.num_inference_steps, rollout_id, config.seed
        )
        x, recorded = self.sample(ids, steps)
        images = ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        advantage = torch.zeros(len(ids))
        for scorer, weight in ((self.ocr, 0.6), (self.color, 0.4)):
            scores = torch.tensor(scorer.score(images, records)).view(-1, group)
            centred = scores - scores.mean(1, keepdim=True)
            advantage += (weight * centred / (scores.std(1, keepdim=True) + 1e-8)).flatten()
        before, after, sigma, old = (torch.stack(column) for column in zip(*recorded, strict=True))
        for part in torch.randperm(len(ids)).chunk(config.stack.num_updates_per_batch):
            rows = [t[:, part].flatten(0, 1) for t in (before, after, sigma, old)]
            rows += [ids[part].repeat(len(steps), 1), advantage[part].repeat(len(steps))]
            self.update(rows)

    def update(self, rows: list[torch.Tensor]) -> None:
        clip, size = self.config.algorithm.clip_range, self.config.stack.micro_batch_size
        for micro in zip(*(row.split(size) for row in rows), strict=True):
            before, after, sigma, old, ids, a = micro
            mean, std = self.gaussian(before, sigma, ids)
            ratio = (log_prob(after, mean, std) - old).exp()
            loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip, 1 + clip)).sum()
            (loss / len(rows[0])).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.config.stack.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def log_prob(value: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """[B], without the constant that cancels in a ratio of equal stds."""
    return -((value - mean) ** 2 / (2 * std**2)).mean((1, 2, 3))


def seconds(work: object) -> float:
    started = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - started


def report(name: str, ours: list[float], bare: list[float]) -> None:
    ratio = statistics.median(ours) / statistics.median(bare)
    print(f"{name}: ours / bare = {ratio:.3f} (ratio of medians of {len(ours)} windows each)")
    for label, values in (("ours", ours), ("bare", bare)):
        print(
            f"  {label}: min {min(values):.3f} s, median {statistics.median(values):.3f} s, "
            f"max {max(values):.3f} s"
        )


def start_up(command: list[str]) -> float:
    """Best of three, in seconds; fails when torch or diffusers was imported."""
    code = (
        "import sys; from unirl.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'diffusers'} & set(sys.modules), 'imports torch or diffusers'"
    )
    return min(
        seconds(
            lambda: subprocess.run(
                [sys.executable, "-c", code, *command], check=True, capture_output=True
            )
        )
        for _ in range(3)
    )


if __name__ == "__main__":
    main()
